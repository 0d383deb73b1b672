"""Muon for parameters that are sharded over ranks: Newton-Schulz runs once for each matrix, on one rank.

    buffer <- buffer + (1 - momentum) (gradient - buffer)
    update <- orthogonal factor of (gradient + momentum (buffer - gradient))        (Nesterov; else of the buffer)
    parameter <- (1 - lr weight_decay) parameter - lr scale update

The first and the last line work on local shards, the second on the matrix's owner. The result is that of
`torch.optim.Muon` in one process, however many ranks there are. Muon: https://kellerjordan.github.io/posts/muon/, the
scale that matches AdamW's: arXiv:2502.16982.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.profiler import record_function

from titan_loom.optim.newton_schulz import Triple, orthogonalize, step_coefficients
from titan_loom.optim.owner_exchange import OwnerExchange

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Muon(torch.optim.Optimizer):
    """`torch.optim.Muon` for matrices (m, n) and stacks of matrices (e, m, n), sharded by FSDP2 or not.

    A parameter is a plain tensor, or a DTensor that on at most one mesh axis is sharded, by its first dimension or a
    stack's matrices evenly by their rows, and replicated on the others. Where a stack is sharded by its first dimension
    its matrices are whole, and nothing is communicated. All ranks must call `step` together, with gradients for the
    same parameters; those without are skipped.

    The state is `momentum_buffer`, shaped and sharded like its parameter.

    Args:
        params: parameters or groups of them; every argument below can be set by group, and `lr` and `weight_decay`
            (floats) changed between steps.
        momentum: decay of the gradients' running mean.
        ns_coefficients: "quintic", "polar_express", one triple (a, b, c), or a list of one triple for each step.
        eps: least Frobenius norm by which a matrix is divided before the first step.
        ns_steps: Newton-Schulz steps.
        adjust_lr_fn: the scale: "original" (also None), sqrt(max(1, m / n)); "match_rms_adamw", 0.2 sqrt(max(m, n)).
        ns_dtype: dtype of Newton-Schulz, and of what travels: "bfloat16" or "float32".

    Raises:
        ValueError: for a parameter of another shape or sharding, or another value of the three choices.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: str | Triple | Sequence[Triple] = "quintic",
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        ns_dtype: str = "bfloat16",
    ):
        defaults = dict(
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            ns_coefficients=ns_coefficients,
            eps=eps,
            ns_steps=ns_steps,
            adjust_lr_fn=adjust_lr_fn,
            ns_dtype=ns_dtype,
        )
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        step_coefficients(group["ns_coefficients"], group["ns_steps"])
        if group["ns_dtype"] not in DTYPES:
            raise ValueError(f"ns_dtype is {group['ns_dtype']!r}; it must be {' or '.join(DTYPES)}")
        for parameter in group["params"]:
            if parameter.ndim not in (2, 3):
                raise ValueError(f"Muon takes matrices and stacks of matrices, not a parameter of {parameter.shape}")
            lr_scale(parameter.shape, group["adjust_lr_fn"])
            placements = parameter.placements if isinstance(parameter, DTensor) else ()
            sharded = [placement for placement in placements if not placement.is_replicate()]
            if sharded not in ([], [Shard(0)], [Shard(parameter.ndim - 2)]):
                raise ValueError(f"Muon takes parameters sharded once, not by columns, not one that is {placements}")

    @torch.no_grad()
    def step(self, closure=None):
        """Take one step. Returns what `closure`, which recomputes the gradients, returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            by_ranks = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_ranks[_ranks_of_rows(parameter)].append(parameter)
            for ranks, parameters in by_ranks.items():
                self._step(group, parameters, ranks)
        return loss

    def _step(self, group: dict[str, Any], parameters: list[Tensor], ranks: dist.ProcessGroup | None) -> None:
        """One step of parameters whose rows lie on the same ranks."""
        dtype = DTYPES[group["ns_dtype"]]
        coefficients = step_coefficients(group["ns_coefficients"], group["ns_steps"])
        local = [_local(parameter) for parameter in parameters]
        with record_function("Muon: momentum"):
            updates = self._update_momentum(group, parameters)
        if ranks is None:
            with record_function("Muon: Newton-Schulz"):
                updates = orthogonalize(updates, coefficients, eps=group["eps"], dtype=dtype)
        else:
            counts = [len(parameter) if parameter.ndim == 3 else 1 for parameter in parameters]
            shapes = [p.shape[-2:] for p, count in zip(parameters, counts, strict=True) for _ in range(count)]
            exchange = OwnerExchange(shapes, ranks, dtype)
            with record_function("Muon: gather"):
                matrices = exchange.gather([rows for u in updates for rows in (u if u.ndim == 3 else [u])])
            with record_function("Muon: Newton-Schulz"):
                matrices = orthogonalize(matrices, coefficients, eps=group["eps"], dtype=dtype)
            with record_function("Muon: scatter"):
                rows = iter(exchange.scatter(matrices, like=local[0]))
                updates = [
                    torch.stack(list(islice(rows, count))) if shard.ndim == 3 else next(rows)
                    for shard, count in zip(local, counts, strict=True)
                ]
        with record_function("Muon: apply"):
            torch._foreach_mul_(local, 1 - group["lr"] * group["weight_decay"])
            same_scale = defaultdict(lambda: ([], []))
            for parameter, shard, update in zip(parameters, local, updates, strict=True):
                shards, shard_updates = same_scale[lr_scale(parameter.shape, group["adjust_lr_fn"])]
                shards.append(shard)
                shard_updates.append(update)
            for scale, (shards, shard_updates) in same_scale.items():
                torch._foreach_add_(shards, shard_updates, alpha=-group["lr"] * scale)

    def _update_momentum(self, group: dict[str, Any], parameters: list[Tensor]) -> list[Tensor]:
        """Move the momentum buffers; returns the local shards of what is to be orthogonalised."""
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.grad)
        gradients = [_local(parameter.grad) for parameter in parameters]
        buffers = [_local(self.state[parameter]["momentum_buffer"]) for parameter in parameters]
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        return torch._foreach_lerp(gradients, buffers, group["momentum"]) if group["nesterov"] else buffers


def lr_scale(shape: Sequence[int], adjust_lr_fn: str | None) -> float:
    """Factor of the learning rate of matrices (..., m, n)."""
    rows, columns = shape[-2:]
    match adjust_lr_fn:
        case None | "original":
            return math.sqrt(max(1, rows / columns))
        case "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
    raise ValueError(f"adjust_lr_fn is {adjust_lr_fn!r}; it must be original or match_rms_adamw")


def _ranks_of_rows(parameter: Tensor) -> dist.ProcessGroup | None:
    """The ranks on which the rows of a matrix, or of each in a stack, lie; None when matrices are whole."""
    if not isinstance(parameter, DTensor):
        return None
    mesh, by_rows = parameter.device_mesh, Shard(parameter.ndim - 2)
    sharded = [axis for axis, placement in enumerate(parameter.placements) if placement == by_rows]
    return mesh.get_group(sharded[0]) if sharded and mesh.size(sharded[0]) > 1 else None


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
