"""What families say about the order in which their layers run. No torch here.

A *layer* is physical, a *loop* is a pass over the looped stack, a *visit* is one execution of a layer.
"""

from typing import NamedTuple


class Stage(NamedTuple):
    """A part of the schedule: the layers of the prelude, of one loop, of the coda, or of a whole list."""

    name: str
    layers: tuple[int, ...]
    is_loop: bool = False
