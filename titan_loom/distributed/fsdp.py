"""FSDP2 for models whose blocks run several times in a forward.

Every block is one unit and the rest of the model (embedding, head, norms outside the blocks) is the root unit. A block
stays gathered from its first visit to the end of backward, so it is gathered once and its gradient is reduced once,
however often it runs. Gradients are summed, never averaged: the loss is already divided by the global token count.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from titan_loom.tools.logging import logger


def apply_fsdp(model: nn.Module, mesh: DeviceMesh, *, param_dtype: torch.dtype, reduce_dtype: torch.dtype) -> None:
    """Shard `model` (with `blocks` and `looped_layers`) over `mesh`, in place.

    Args:
        param_dtype: dtype of the gathered parameters and of the activations.
        reduce_dtype: dtype of the gradients' reduction.
    """
    # Blocks get their inputs from the root in the right dtype; casting here would round the fp32 RoPE tables.
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for layer in model.looped_layers:
        # The backward of a block's last visit must not free what its earlier visits still need.
        model.blocks[layer].set_reshard_after_backward(False, recurse=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # gloo has no pre-multiplied sum, which a divide factor would otherwise select.
            module.set_force_sum_reduction_for_comms(True)
    logger.info(
        f"Applied FSDP2 over {mesh.size()} ranks: {len(model.blocks)} blocks and the root, looped blocks stay "
        f"gathered, {param_dtype} parameters and {reduce_dtype} reductions"
    )


def set_last_micro_batch(model: nn.Module, last: bool) -> None:
    """Reduce gradients only in the backward of an optimizer step's last micro-batch."""
    model.set_requires_gradient_sync(last)
    model.set_is_last_backward(last)


def reshard_looped_blocks(model: nn.Module) -> None:
    """Free the gathered weights of looped blocks after backward; parameters and gradients are shards again."""
    for layer in model.looped_layers:
        model.blocks[layer].reshard()
