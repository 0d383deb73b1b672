"""Clipping by the global gradient norm, which comes out the same however the parameters are sharded."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradients in place to a global norm of at most `max_norm`; returns the norm before: fp32 scalar.

    The squares are summed in fp64, since fp32 sums of a million of them differ by 1e-4 with the number of shards.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norms = [torch.linalg.vector_norm(parameter.grad, dtype=torch.float64) for parameter in parameters]
    grad_norm = torch.linalg.vector_norm(torch.stack(norms)).float()
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, grad_norm)
    if not isinstance(grad_norm, DTensor):
        return grad_norm
    # Gradients that are kept on the host give it there, and the ranks compute elsewhere.
    return grad_norm.full_tensor().to(grad_norm.device_mesh.device_type)
