"""What the arguments of all families have in common: sizes that fit together, and an order in which layers run.

A *layer* is physical, a *loop* is a pass over the looped stack, a *visit* is one execution of a layer. No torch here.
"""

from typing import NamedTuple

from titan_loom.config.bounds import check_bounds
from titan_loom.errors import UserError


class Stage(NamedTuple):
    """A part of the schedule: the layers of the prelude, of one loop, of the coda, or of a whole list."""

    name: str
    layers: tuple[int, ...]
    is_loop: bool = False


class LoopedArgs:
    """The base of a family's arguments, a frozen dataclass with `num_loops` and the sizes of attention.

    A family says which `stages` its forward pass has and which layers are the looped stack, `loop_layers`.
    """

    def __post_init__(self) -> None:
        check_bounds(self, "model.args")
        self.require("head_dim", self.head_dim % 2 == 0, "even, since RoPE turns pairs")
        self.require(
            "num_kv_heads", self.num_heads % self.num_kv_heads == 0, f"a divisor of num_heads = {self.num_heads}"
        )

    def require(self, name: str, condition: bool, allowed: str) -> None:
        """Raises UserError about the field `name` unless `condition` holds."""
        if not condition:
            raise UserError(f"model.args.{name} is {getattr(self, name)}; it must be {allowed}")

    def visits(self, num_loops: int | None = None) -> tuple[int, ...]:
        """Layers in the order in which they run; see `stages`."""
        return tuple(layer for stage in self.stages(num_loops) for layer in stage.layers)

    @property
    def num_visits(self) -> int:
        """Executions of a layer in one forward pass of training."""
        return len(self.visits())

    @property
    def looped_layers(self) -> tuple[int, ...]:
        """Layers that training visits more than once."""
        visits = self.visits()
        return tuple(layer for layer in range(self.num_layers) if visits.count(layer) > 1)
