"""What the trainer asks of a model family, beside the attributes of its model: a forward pass in segments of loops.

Loops are counted from 0. A segment that does not begin with the first loop goes on from the detached state which the
one before it left in `LoopOutput.carried`, so that gradients end where a segment begins.
"""

from __future__ import annotations  # a configuration is checked without loading torch

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn


class Segment(NamedTuple):
    """Loops [start, stop) of a forward pass, counted from 0."""

    start: int
    stop: int


class LoopOutput(NamedTuple):
    """What `model(tokens, ...)` returns."""

    hidden: Tensor
    """(batch, seq, dim): what the head reads after the last loop that ran."""

    carried: tuple[Tensor, ...]
    """What the next segment starts from, detached."""

    router_z: Tensor | None = None
    """(batch, seq) fp32: logsumexp(router logits)^2, averaged over the layers and the loops that ran; None without
    routers."""

    expert_load: Tensor | None = None
    """(layers, experts), detached: tokens sent to each routed expert, summed over the loops that ran, padding left out;
    None without routers."""

    readouts: tuple[Tensor, ...] = ()
    """With `every_loop`: `hidden` as it would be after each loop that ran, in order."""


class Observer(Protocol):
    """Is shown the state of a forward pass, by the model's own loop: never inside a compiled or checkpointed block."""

    def after_block(self, loop: int, layer: int, x: Tensor) -> None:
        """x: (batch, seq, dim), the stream after the block."""

    def after_loop(self, loop: int, z: Tensor) -> None:
        """z: (batch, seq, dim), the state after a pass over the looped stack."""

    def routing(self, loop: int, layer: int, selected: Tensor) -> None:
        """selected: (tokens, k) int64, the routed experts that each token was sent to."""


def count_parameters(module: nn.Module) -> int:
    """Elements of the module's parameters, shared ones once, sharded ones in full."""
    return sum(parameter.numel() for parameter in module.parameters())
