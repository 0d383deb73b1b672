"""What describes a LOOM: its sizes, and a switch for each part that the paper takes away again. No torch here.

All layers are looped: a forward pass is `num_loops` passes over the whole stack (arXiv 2610.01153).
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from titan_loom.errors import UserError
from titan_loom.models.schedule import Stage

if TYPE_CHECKING:
    from titan_loom.models.loom.model import Loom

_MAY_BE_ZERO = ("num_shared_experts", "residual_lambda", "layer_beta", "loop_beta", "balance_rate")


@dataclass(frozen=True, kw_only=True)
class LoomArgs:
    vocab_size: int = 49_152
    """Entries of the tokenizer; rows of the embedding and, apart from it, of the head."""

    dim: int
    """Width of the residual stream."""

    num_layers: int
    """Physical layers, L. All of them run in every loop."""

    num_heads: int
    """Query heads, each with a gate."""

    num_kv_heads: int
    """Key and value heads; a divisor of `num_heads`."""

    head_dim: int
    """Width of a head (even: RoPE turns pairs)."""

    num_experts: int
    """Routed experts of a layer, E."""

    num_shared_experts: int
    """Experts of a layer that every token visits."""

    top_k: int
    """Routed experts that a token visits, shared ones not counted."""

    expert_dim: int
    """Width inside the SwiGLU of an expert."""

    num_loops: int
    """Passes over the stack in training, H. Evaluation may use another number: gamma keeps this one, and loops beyond
    it use the last router."""

    max_seq_len: int = 1023
    """Longest context in tokens."""

    rope_theta: float = 10_000.0
    """Base of the rotary position embedding's wavelengths."""

    norm_eps: float = 1e-6
    """Epsilon of every norm."""

    residual_lambda: float = 0.5
    """lambda: gamma = lambda / (H sqrt(L)) scales what a layer adds, g_t = lambda / (t sqrt(L)) the embedding's return
    in loop t."""

    layer_beta: float = 0.5
    """beta_L: how much of the mean of a loop's attention writes the next layer keeps."""

    loop_beta: float = 0.5
    """beta_H: the same for the mean over all layers and loops."""

    residual_scale: bool = True
    """Scale what a layer adds by gamma; off: by 1."""

    embed_inject: bool = True
    """Mix the token embedding into the stream at the start of every loop but the first."""

    looping_residual: bool = True
    """Add the running means of attention's writes to the stream; off: add the write itself."""

    ffn_branch_norm: bool = True
    """Normalise what the experts add, with a learned scale."""

    per_loop_routers: bool = True
    """A router for every loop; off: one for all."""

    kv_gate: bool = False
    """Keys and values from a state that a learned gate updates once a loop (MELT, arXiv 2605.07721)."""

    kv_cache: Literal["per_loop", "shared"] = "per_loop"
    """What decoding keeps of past tokens: keys and values of every loop, or of the last one alone."""

    capacity_factor: float | None = None
    """In training, drop the lowest gates beyond this many times an even share of an expert, per micro-batch of a
    rank: what a token gets then depends on the others. Default: drop nothing."""

    balance_rate: float = 2e-3
    """Step of the selection bias that evens out the experts' loads, once per optimizer data step."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) in (int, float):
                may_be_zero = name in _MAY_BE_ZERO
                self._require(
                    name, value > 0 or (value == 0 and may_be_zero), "0 or more" if may_be_zero else "above 0"
                )
        self._require("head_dim", self.head_dim % 2 == 0, "even, since RoPE turns pairs")
        self._require(
            "num_kv_heads", self.num_heads % self.num_kv_heads == 0, f"a divisor of num_heads = {self.num_heads}"
        )
        self._require("top_k", self.top_k <= self.num_experts, f"at most num_experts = {self.num_experts}")
        for name in ("layer_beta", "loop_beta"):
            self._require(name, getattr(self, name) <= 1, "from 0 to 1")

    def _require(self, name: str, condition: bool, allowed: str) -> None:
        if not condition:
            raise UserError(f"model.args.{name} is {getattr(self, name)}; it must be {allowed}")

    @property
    def gamma(self) -> float:
        """What scales everything that a layer adds to the stream."""
        return self.residual_lambda / (self.num_loops * math.sqrt(self.num_layers)) if self.residual_scale else 1.0

    def injection(self, loop: int) -> float:
        """g_t of loop t = `loop` + 1: the share of the embedding in what the loop starts from; 1 for the first."""
        if loop == 0:
            return 1.0
        return min(self.residual_lambda / ((loop + 1) * math.sqrt(self.num_layers)), 1.0) if self.embed_inject else 0.0

    @property
    def num_routers(self) -> int:
        """Routers of a layer."""
        return self.num_loops if self.per_loop_routers else 1

    @property
    def num_visits(self) -> int:
        """Executions of a layer in one forward pass of training."""
        return len(self.visits())

    @property
    def loop_layers(self) -> tuple[int, ...]:
        """The looped stack: every layer."""
        return tuple(range(self.num_layers))

    @property
    def looped_layers(self) -> tuple[int, ...]:
        """Layers that training visits more than once."""
        return self.loop_layers if self.num_loops > 1 else ()

    def stages(self, num_loops: int | None = None) -> list[Stage]:
        """The loops, in order; `num_loops` of them, by default as trained.

        Raises:
            UserError: `num_loops` is below 1.
        """
        num_loops = self.num_loops if num_loops is None else num_loops
        if num_loops < 1:
            raise UserError(f"num_loops is {num_loops}; it must be 1 or more")
        return [Stage(f"loop {loop + 1}", self.loop_layers, is_loop=True) for loop in range(num_loops)]

    def visits(self, num_loops: int | None = None) -> tuple[int, ...]:
        """Layers in the order in which they run; see `stages`."""
        return tuple(layer for stage in self.stages(num_loops) for layer in stage.layers)

    def visit_notes(self) -> dict[int, str]:
        """What is added to the stream before a visit, for people."""
        if not self.embed_inject:
            return {}
        return {t * self.num_layers: f"embedding, g = {self.injection(t):.4f}" for t in range(1, self.num_loops)}

    def build(self) -> "Loom":
        """The model, on the current default device."""
        from titan_loom.models.loom.model import Loom

        return Loom(self)
