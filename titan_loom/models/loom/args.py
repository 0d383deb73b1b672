"""What describes a LOOM: its sizes, and a switch for each part that the paper takes away again. No torch here.

All layers are looped: a forward pass is `num_loops` passes over the whole stack (arXiv 2610.01153).
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from titan_loom.config.bounds import Fraction, NotNegative, Positive
from titan_loom.errors import UserError
from titan_loom.models.schedule import LoopedArgs, Stage

if TYPE_CHECKING:
    from titan_loom.models.loom.model import Loom


@dataclass(frozen=True, kw_only=True)
class LoomArgs(LoopedArgs):
    vocab_size: Positive[int] = 49_152
    """Entries of the tokenizer; rows of the embedding and, apart from it, of the head."""

    dim: Positive[int]
    """Width of the residual stream."""

    num_layers: Positive[int]
    """Physical layers, L. All of them run in every loop."""

    num_heads: Positive[int]
    """Query heads, each with a gate."""

    num_kv_heads: Positive[int]
    """Key and value heads; a divisor of `num_heads`."""

    head_dim: Positive[int]
    """Width of a head (even: RoPE turns pairs)."""

    num_experts: Positive[int]
    """Routed experts of a layer, E."""

    num_shared_experts: NotNegative[int]
    """Experts of a layer that every token visits."""

    top_k: Positive[int]
    """Routed experts that a token visits, shared ones not counted."""

    expert_dim: Positive[int]
    """Width inside the SwiGLU of an expert."""

    num_loops: Positive[int]
    """Passes over the stack in training, H. Evaluation may use another number: gamma keeps this one, and loops beyond
    it use the last router."""

    max_seq_len: Positive[int] = 1023
    """Longest context in tokens."""

    rope_theta: Positive[float] = 10_000.0
    """Base of the rotary position embedding's wavelengths."""

    norm_eps: Positive[float] = 1e-6
    """Epsilon of every norm."""

    residual_lambda: NotNegative[float] = 0.5
    """lambda: gamma = lambda / (H sqrt(L)) scales what a layer adds, g_t = lambda / (t sqrt(L)) the embedding's return
    in loop t."""

    layer_beta: Fraction = 0.5
    """beta_L: how much of the mean of a loop's attention writes the next layer keeps."""

    loop_beta: Fraction = 0.5
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

    capacity_factor: Positive[float] | None = None
    """In training, drop the lowest gates beyond this many times an even share of an expert, per micro-batch of a
    rank: what a token gets then depends on the others. Default: drop nothing."""

    balance_rate: NotNegative[float] = 2e-3
    """Step of the selection bias that evens out the experts' loads, once per optimizer data step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("top_k", self.top_k <= self.num_experts, f"at most num_experts = {self.num_experts}")

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
    def loop_layers(self) -> tuple[int, ...]:
        """The looped stack: every layer."""
        return tuple(range(self.num_layers))

    def stages(self, num_loops: int | None = None) -> list[Stage]:
        """The loops, in order; `num_loops` of them, by default as trained.

        Raises:
            UserError: `num_loops` is below 1.
        """
        num_loops = self.num_loops if num_loops is None else num_loops
        if num_loops < 1:
            raise UserError(f"num_loops is {num_loops}; it must be 1 or more")
        return [Stage(f"loop {loop + 1}", self.loop_layers, is_loop=True) for loop in range(num_loops)]

    def visit_notes(self) -> dict[int, str]:
        """What is added to the stream before a visit, for people."""
        if not self.embed_inject:
            return {}
        return {t * self.num_layers: f"embedding, g = {self.injection(t):.4f}" for t in range(1, self.num_loops)}

    def build(self) -> "Loom":
        """The model, on the current default device."""
        from titan_loom.models.loom.model import Loom

        return Loom(self)
