"""Units: which parts of a model are communicated together, and how many bytes that moves.

Every block is a unit, or the looped stack is one as a whole; what is outside the blocks (embedding, head, norms) is the
root unit. Sharding pads the rows of a parameter to a multiple of the ranks; the bytes here include that.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titan_loom.config import job_config
from titan_loom.distributed.mesh import REPLICATE, SHARD
from titan_loom.errors import UserError

KEEP_GATHERED_BYTES = 4 * 2**30
STACK_BYTES = 64 * 2**20
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Unit:
    layers: tuple[int, ...]
    """Blocks in the order in which they run; none for the root."""
    numel: int
    """Elements of its parameters, padded to the ranks that share them."""
    is_looped: bool = False


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Collectives of one optimizer step, and the bytes of each kind's whole tensors, summed."""

    all_gathers: int
    all_gather_bytes: int
    reduce_scatters: int
    reduce_scatter_bytes: int
    all_reduces: int
    all_reduce_bytes: int


@dataclass(frozen=True, kw_only=True)
class Units:
    """How the units of a model are laid out over a mesh."""

    of_blocks: list[Unit]
    root: Unit
    replicate: int
    """Copies of the parameters."""
    shard: int
    """Ranks that share a copy."""
    reshard_after_forward: bool
    """Whether gathered parameters are freed after forward, in every micro-batch."""
    param_bytes: int
    """Bytes of an element that is gathered."""
    reduce_bytes: int
    """Bytes of an element that is reduced."""

    @property
    def is_sharded(self) -> bool:
        """Parameters are shards (FSDP2, HSDP, also over one rank), not whole copies (DDP)."""
        return self.shard > 1 or self.replicate == 1

    def traffic(self, micro_batches: int) -> Traffic:
        """What one rank communicates in an optimizer step; nothing among one rank."""
        units = [*self.of_blocks, self.root]
        numel = sum(unit.numel for unit in units)
        gathered, gathers = numel, len(units)
        if self.reshard_after_forward:
            gathered, gathers = (2 * numel - self.root.numel) * micro_batches, (2 * len(units) - 1) * micro_batches
        sharded, replicated = self.shard > 1, self.replicate > 1
        return Traffic(
            all_gathers=gathers * sharded,
            all_gather_bytes=gathered * self.param_bytes * sharded,
            reduce_scatters=len(units) * sharded,
            reduce_scatter_bytes=numel * self.reduce_bytes * sharded,
            all_reduces=len(units) * replicated,
            all_reduce_bytes=numel // self.shard * self.reduce_bytes * replicated,
        )

    def describe(self, micro_batches: int) -> str:
        """The layout and its traffic in one line, for the log."""
        mode = "HSDP" if self.shard > 1 and self.replicate > 1 else "FSDP2" if self.is_sharded else "DDP"
        stack = next((unit for unit in self.of_blocks if len(unit.layers) > 1), None)
        loop = f"layers {stack.layers[0]} to {stack.layers[-1]} as one" if stack else "each block for itself"
        freed = "after forward and after backward" if self.reshard_after_forward else "after the step's last backward"
        traffic = self.traffic(micro_batches)
        return (
            f"Applied {mode} with {self.replicate} x {self.shard} ranks (copies x shards): {len(self.of_blocks)} units "
            f"of blocks ({loop}) and the root, gathered weights freed {freed}; per rank and step "
            f"{traffic.all_gathers} all-gathers of {traffic.all_gather_bytes / MIB:.1f} MiB, "
            f"{traffic.reduce_scatters} reduce-scatters of {traffic.reduce_scatter_bytes / MIB:.1f} MiB, "
            f"{traffic.all_reduces} all-reduces of {traffic.all_reduce_bytes / MIB:.1f} MiB"
        )


def shard_dim(shape: Sequence[int], ranks: int) -> int:
    """The dimension along which `ranks` share a parameter: the first, but 1, each matrix's rows, in a stack of fewer
    matrices than ranks. Along others than the first FSDP2 does not pad, so the rows have to divide."""
    return int(len(shape) == 3 and shape[0] < ranks and shape[1] % ranks == 0)


def plan_units(
    model: nn.Module,
    mesh: DeviceMesh,
    config: job_config.Parallelism,
    *,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
) -> Units:
    """The units of `model` (with `blocks` and `args`), not wrapped yet, over `mesh`.

    Raises:
        UserError: the loop is to be one unit, but the model's schedule is a list without one.
    """
    axes = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    shard = axes.get(SHARD, 1)

    def numel(module: nn.Module) -> int:
        return sum(_padded_numel(parameter, shard) for parameter in module.parameters())

    loop, looped = model.args.loop_layers, model.args.looped_layers
    of_layer = [numel(block) for block in model.blocks]
    is_stack = config.fsdp_loop_unit == "stack"
    if is_stack and not loop:
        raise UserError("parallelism.fsdp_loop_unit is 'stack'; with model.args.schedule it must be 'auto' or 'block'")
    if config.fsdp_loop_unit == "auto" and set(loop) & set(looped):
        is_stack = sum(of_layer[layer] for layer in loop) * param_dtype.itemsize <= STACK_BYTES
    layers = [(layer,) for layer in range(len(of_layer))]
    if is_stack:
        layers[loop[0] : loop[-1] + 1] = [loop]
    total = numel(model)
    return Units(
        of_blocks=[
            Unit(
                layers=unit,
                numel=sum(of_layer[layer] for layer in unit),
                is_looped=not set(unit).isdisjoint(looped),
            )
            for unit in layers
        ],
        root=Unit(layers=(), numel=total - sum(of_layer)),
        replicate=axes.get(REPLICATE, 1),
        shard=shard,
        reshard_after_forward=_reshards_after_forward(config, shard, total * param_dtype.itemsize),
        param_bytes=param_dtype.itemsize,
        reduce_bytes=reduce_dtype.itemsize,
    )


def _reshards_after_forward(config: job_config.Parallelism, shard: int, gathered_bytes: int) -> bool:
    match config.fsdp_reshard_after_forward:
        case "always":
            return shard > 1
        case "never":
            return False
    return shard > 1 and gathered_bytes > KEEP_GATHERED_BYTES


def _padded_numel(parameter: Tensor, shard: int) -> int:
    rows = parameter.shape[shard_dim(parameter.shape, shard)]
    return -(-rows // shard) * shard * (parameter.numel() // rows)
