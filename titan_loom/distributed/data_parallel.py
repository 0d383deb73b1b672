"""FSDP2, HSDP and DDP for models whose blocks run several times in a forward.

A looped unit is gathered once and reduced once, however often it runs: it keeps its weights and holds back its gradient
until backward has come to its first visit. Gradients are summed, never averaged: the loss is already divided by the
global token count. They are reduced in the last micro-batch of an optimizer step only.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from titan_loom.distributed.units import Units, shard_dim
from titan_loom.errors import UserError


def apply_data_parallel(
    model: nn.Module,
    units: Units,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    cpu_offload: bool = False,
) -> "DataParallel":
    """Shard or replicate `model` (with `blocks`) over `mesh`, in place.

    Args:
        units: what is communicated together, planned for the same mesh.
        param_dtype: dtype of the gathered parameters and of the activations.
        reduce_dtype: dtype of the gradients' reduction.
        cpu_offload: shards and reduced gradients stay in the host's memory, where the parameters must be allocated.

    Raises:
        UserError: this torch is too old for DDP.
    """
    # Blocks get their inputs from the root in the right dtype; casting here would round the fp32 RoPE tables.
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if cpu_offload else OffloadPolicy()
    for unit in units.of_blocks:
        _wrap(
            [model.blocks[layer] for layer in unit.layers],
            mesh,
            policy,
            offload,
            is_sharded=units.is_sharded,
            reshard_after_forward=units.reshard_after_forward and not unit.is_looped,
        )
    # The head is the embedding and is used after forward, so the root is never freed before backward.
    _wrap(model, mesh, policy, offload, is_sharded=units.is_sharded, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # gloo has no pre-multiplied sum, which a divide factor would otherwise select.
            module.set_force_sum_reduction_for_comms(True)
    return DataParallel(model, units, mesh, reduce_dtype)


def _wrap(
    modules: nn.Module | list[nn.Module],
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    offload: OffloadPolicy,
    *,
    is_sharded: bool,
    reshard_after_forward: bool,
) -> None:
    """Make one unit of `modules`."""
    if is_sharded:
        fully_shard(
            modules,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=lambda parameter: Shard(shard_dim(parameter.shape, mesh.shape[-1])),
        )
        return
    try:
        from torch.distributed._composable.replicate_with_fsdp import replicate
    except ImportError as error:
        raise UserError(
            "parallelism.data_parallel_shard_degree is 1 with several replicas, which is DDP and needs a newer torch "
            f"than {torch.__version__}; here it must be above 1"
        ) from error
    replicate(modules, mesh=mesh, mp_policy=policy, offload_policy=offload)


class DataParallel:
    """Tells the units of a wrapped model when to reduce gradients and when to free what was gathered."""

    def __init__(self, model: nn.Module, units: Units, mesh: DeviceMesh, reduce_dtype: torch.dtype):
        self.units = units
        self.mesh = mesh
        self._model = model
        self._looped = [
            _LoopedUnit([model.blocks[layer] for layer in unit.layers], reduce_dtype)
            for unit in units.of_blocks
            if unit.is_looped
        ]
        if units.reshard_after_forward:
            model.register_forward_hook(lambda *_: self._reshard_looped())

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Surrounds forward and backward of a micro-batch, the `last` of an optimizer step or not.

        After the last one, every parameter and every gradient is a shard again.
        """
        reshard = last or self.units.reshard_after_forward
        self._model.set_is_last_backward(last)
        self._model.set_requires_gradient_sync(last)
        self._model.set_reshard_after_backward(reshard)
        for unit in self._looped:
            unit.start(reduce=last)
        yield
        if reshard:
            self._reshard_looped()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Surrounds forward passes without gradient. After them, every parameter is a shard again: no backward comes
        that would free what was gathered."""
        self._model.eval()
        with torch.no_grad():
            yield
        self._model.train()
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _reshard_looped(self) -> None:
        for unit in self._looped:
            unit.reshard()


class _LoopedUnit:
    """Blocks that run several times, in the order in which they run.

    FSDP2 ends a unit's backward at every visit: left alone, it would free the weights that earlier visits still need,
    and reduce what earlier micro-batches have accumulated apart from what this one adds. The gradients of the visits
    are added up in `reduce_dtype`, like those of micro-batches.
    """

    def __init__(self, blocks: list[nn.Module], reduce_dtype: torch.dtype):
        self._unit: FSDPModule = blocks[0]
        self._reduce_dtype = reduce_dtype
        self._waits_for_first_visit = False
        for block in blocks:
            block.register_forward_pre_hook(self._before_visit)
        blocks[-1].register_forward_hook(self._after_visit)

    def start(self, *, reduce: bool) -> None:
        self._waits_for_first_visit = reduce
        self._unit.set_requires_gradient_sync(False, recurse=False)
        self._unit.set_reshard_after_backward(False, recurse=False)

    def reshard(self) -> None:
        self._unit.reshard()

    def _before_visit(self, block: nn.Module, _args: tuple) -> None:
        # Else autograd adds them up in the parameters' dtype, and FSDP2 refuses a unit in which a parameter that the
        # first visit does not use is already in the dtype of the reduction.
        for parameter in block.parameters():  # the gathered ones
            parameter.grad_dtype = self._reduce_dtype

    def _after_visit(self, _block: nn.Module, _args: tuple, output: Tensor | tuple[Tensor, ...]) -> None:
        # The first visit that is differentiated; earlier ones may run without gradient, later ones may be recomputed.
        x = output[0] if isinstance(output, tuple) else output  # the stream, on which all later visits depend
        if self._waits_for_first_visit and x.requires_grad:
            self._waits_for_first_visit = False
            x.register_hook(self._backward_reaches_first_visit)

    def _backward_reaches_first_visit(self, _gradient: Tensor) -> None:
        self._unit.set_requires_gradient_sync(True, recurse=False)
