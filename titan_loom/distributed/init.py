"""Initial weights that depend on the seed and the parameter's name only, not on how the model is sharded.

Each parameter is drawn in full, in fp32, on the CPU, from a generator of its own, and every rank keeps its shard. (The
random numbers of DTensor differ with the number of ranks.) At most one full parameter exists at a time.
"""

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titan_loom.tools.random import derive_seed


@torch.no_grad()
def materialize(model: nn.Module, device: torch.device, seed: int, *, cpu_offload: bool = False) -> None:
    """Allocate a model that was built on the meta device and fill it with its initial weights.

    The model names the values: `model.init_parameter(name, out, generator)` fills the full fp32 tensor `out`, and
    `model.init_buffer(name, out)` a buffer, of which every rank has all. With `cpu_offload` the parameters, not the
    buffers, are on the CPU rather than on `device`.
    """
    model.to_empty(device="cpu" if cpu_offload else device)

    def generator(name: str) -> torch.Generator:
        return torch.Generator().manual_seed(derive_seed(seed, "init", name))

    for name, parameter in model.named_parameters():
        full = torch.empty(parameter.shape, dtype=torch.float32)
        model.init_parameter(name, full, generator)
        if isinstance(parameter, DTensor):
            shape, offset = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            shard = full[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]
            parameter.to_local().copy_(shard)
        else:
            parameter.copy_(full)
    for name, buffer in list(model.named_buffers()):
        full = torch.empty(buffer.shape, dtype=buffer.dtype)
        model.init_buffer(name, full)
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, full.to(device))
