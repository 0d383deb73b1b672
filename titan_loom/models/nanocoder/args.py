"""What describes a NanoCoder: its sizes and its schedule, the order in which layers run. No torch here.

The schedule is data: `prelude`, `loop`, `coda` and `num_loops` spell the usual shape, and `schedule` takes any other.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from titan_loom.config.bounds import NotNegative, Positive
from titan_loom.errors import UserError
from titan_loom.models.schedule import LoopedArgs, Stage

if TYPE_CHECKING:
    from titan_loom.models.nanocoder.model import NanoCoder


Visits = tuple[tuple[int, int | None], ...]
"""Layers in the order in which they run, each with the injection scale of the n-gram memory added before it, if any."""


@dataclass(frozen=True, kw_only=True)
class NanoCoderArgs(LoopedArgs):
    vocab_size: Positive[int] = 8192
    """Entries of the tokenizer; rows of the embedding, which is the head too."""

    dim: Positive[int]
    """Width of the residual stream."""

    num_heads: Positive[int]
    """Query heads."""

    num_kv_heads: Positive[int]
    """Key and value heads; a divisor of `num_heads`."""

    head_dim: Positive[int]
    """Width of a head (even: RoPE turns pairs)."""

    ffn_dim: Positive[int]
    """Width inside the SwiGLU."""

    prelude: NotNegative[int]
    """Layers that run once, before the looped stack."""

    loop: Positive[int]
    """Layers of the looped stack."""

    coda: NotNegative[int]
    """Layers that run once, after the looped stack."""

    num_loops: Positive[int]
    """Passes over the looped stack in training. Also the number of injection scales; evaluation may use another."""

    schedule: tuple[int, ...] | None = None
    """Layers (from 0) in the order in which they run. Replaces `prelude`, `loop`, `coda` and `num_loops`."""

    ngram_visits: tuple[int, ...] | None = None
    """Positions in `schedule` (from 0) before which the n-gram memory is added, each with a scale of its own. Needed
    with `schedule`; otherwise the memory is added at the start of every loop."""

    refresh: Literal["scalar", "gated"] = "scalar"
    """How a layer takes in the token embedding again: times a learned number, or through a gated causal convolution."""

    ngram_rows: Positive[int]
    """Rows of each n-gram table; more rows are fewer collisions."""

    ngram_dim: Positive[int]
    """Columns of each n-gram table."""

    max_seq_len: Positive[int] = 4096
    """Longest context in tokens."""

    rope_theta: Positive[float] = 100_000.0
    """Base of the rotary position embedding's wavelengths."""

    rope_interleaved: bool = True
    """Pairing of RoPE: elements (2i, 2i + 1) of a head, or (i, i + head_dim / 2). An export with the wrong one still
    works, badly."""

    norm_eps: Positive[float] = 1e-6
    """Epsilon of every RMSNorm."""

    init_std: Positive[float] = 0.02
    """Standard deviation of the initial matrices; those that write to the residual stream get less (see the model)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule is None:
            self.require("ngram_visits", self.ngram_visits is None, "unset without model.args.schedule")
        else:
            self._check_schedule(self.schedule, self.ngram_visits)

    def _check_schedule(self, schedule: tuple[int, ...], ngram_visits: tuple[int, ...] | None) -> None:
        layers = set(schedule)
        every_layer = bool(layers) and layers == set(range(len(layers)))
        self.require("schedule", every_layer, "a list of layers that names every one from 0 to the largest")
        positions = set(ngram_visits or ())
        rising = bool(positions) and list(ngram_visits) == sorted(positions & set(range(len(schedule))))
        self.require("ngram_visits", rising, f"rising positions in model.args.schedule, from 0 to {len(schedule) - 1}")

    @property
    def num_layers(self) -> int:
        """Physical layers."""
        return len(set(self.visits()))

    @property
    def num_injections(self) -> int:
        """Injection scales: times that the n-gram memory is added in training."""
        return len(self.injections())

    @property
    def loop_layers(self) -> tuple[int, ...]:
        """The looped stack; empty when `schedule` is a list."""
        return () if self.schedule is not None else tuple(range(self.prelude, self.prelude + self.loop))

    def stages(self, num_loops: int | None = None) -> list[Stage]:
        """The parts of the schedule, in order.

        Args:
            num_loops: passes over the looped stack; default: as trained.

        Raises:
            UserError: `num_loops` is below 1, or given although `schedule` is a list.
        """
        num_loops = self._num_loops(num_loops)
        if self.schedule is not None:
            return [Stage("schedule", self.schedule)]
        first, last = self.prelude, self.prelude + self.loop
        loops = [Stage(f"loop {t + 1}", tuple(range(first, last)), is_loop=True) for t in range(num_loops)]
        return [
            Stage("prelude", tuple(range(first))),
            *loops,
            Stage("coda", tuple(range(last, last + self.coda))),
        ]

    def plan(self, num_loops: int | None = None) -> tuple[Visits, list[Visits], Visits]:
        """What runs before the loops, in each of them, and after; a `schedule` has no loops. See `stages`."""
        scales = self.injections(num_loops)
        parts, first = [], 0
        for stage in self.stages(num_loops):
            parts.append(tuple((layer, scales.get(first + i)) for i, layer in enumerate(stage.layers)))
            first += len(stage.layers)
        prelude, *loops = parts
        return prelude, loops[:-1], loops[-1] if loops else ()

    def num_undifferentiated(self, num_loops: int | None = None, backprop_loops: int | None = None) -> int:
        """Leading stages that training runs without gradient: all before the last `backprop_loops` loops.

        Raises:
            UserError: as `stages`, and when `backprop_loops` is given although `schedule` is a list.
        """
        if backprop_loops is None:
            return 0
        if self.schedule is not None:
            raise UserError(f"backprop_loops is {backprop_loops}; with model.args.schedule there are no loops to count")
        skipped = self._num_loops(num_loops) - backprop_loops
        return 1 + skipped if skipped > 0 else 0

    def injections(self, num_loops: int | None = None) -> dict[int, int]:
        """Visits before which the n-gram memory is added, each with the index of its scale; see `stages`.

        Loops beyond the trained ones use the last scale.
        """
        num_loops = self._num_loops(num_loops)
        if self.ngram_visits is not None:
            return {visit: scale for scale, visit in enumerate(self.ngram_visits)}
        return {self.prelude + t * self.loop: min(t, self.num_loops - 1) for t in range(num_loops)}

    def visit_notes(self) -> dict[int, str]:
        """What is added to the stream before a visit, for people."""
        return {visit: f"n-gram memory, scale {scale} at visit {visit}" for visit, scale in self.injections().items()}

    def _num_loops(self, num_loops: int | None) -> int:
        if num_loops is None:
            return self.num_loops
        if num_loops < 1:
            raise UserError(f"num_loops is {num_loops}; it must be 1 or more")
        if self.schedule is not None:
            raise UserError(f"num_loops is {num_loops}; with model.args.schedule the order is fixed")
        return num_loops

    def build(self) -> "NanoCoder":
        """The model, on the current default device."""
        from titan_loom.models.nanocoder.model import NanoCoder

        return NanoCoder(self)
