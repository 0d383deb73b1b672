"""Configuration of LOOM, a looped mixture of experts (arXiv 2610.01153), as trained by titan_loom."""

import math

from transformers import PreTrainedConfig


class LoomConfig(PreTrainedConfig):
    """Sizes and switches of a LOOM. All `num_layers` layers run in each of `num_loops` loops.

    Args:
        num_loops: as trained; a forward pass may use another number, and loops beyond it use the last router.
        residual_scale, embed_inject, looping_residual, ffn_branch_norm, per_loop_routers: parts of the architecture.
        kv_gate: keys and values come from a state that a learned gate updates once a loop.
        kv_cache: "per_loop", or "shared": of past tokens, decoding keeps the keys and values of the last loop only.
        balance_rate: what a step of the selection bias is worth.

    Attributes:
        num_hidden_layers: entries of the cache for keys and values.
    """

    model_type = "loom"
    keys_to_ignore_at_inference = ("cache", "past_key_values")

    vocab_size: int = 49152
    hidden_size: int = 512
    num_layers: int = 10
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 64
    num_experts: int = 30
    num_shared_experts: int = 2
    num_experts_per_tok: int = 6
    moe_intermediate_size: int = 512
    num_loops: int = 9
    max_position_embeddings: int = 1023
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    residual_lambda: float = 0.5
    layer_beta: float = 0.5
    loop_beta: float = 0.5
    residual_scale: bool = True
    embed_inject: bool = True
    looping_residual: bool = True
    ffn_branch_norm: bool = True
    per_loop_routers: bool = True
    kv_gate: bool = False
    kv_cache: str = "per_loop"
    capacity_factor: float | None = None
    balance_rate: float = 2e-3
    use_cache: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | None = 2
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs):
        kwargs.pop("num_hidden_layers", None)  # derived
        self.num_hidden_layers = self.num_layers * (1 if self.kv_cache == "shared" else self.num_loops)
        super().__post_init__(**kwargs)

    @property
    def gamma(self):
        """What scales everything that a layer adds to the stream, for any number of loops."""
        return self.residual_lambda / (self.num_loops * math.sqrt(self.num_layers)) if self.residual_scale else 1.0

    def injection(self, loop):
        """The share of the embedding in what loop `loop`, from 0, starts from."""
        if loop == 0:
            return 1.0
        return min(self.residual_lambda / ((loop + 1) * math.sqrt(self.num_layers)), 1.0) if self.embed_inject else 0.0

    @property
    def num_routers(self):
        """Routers of a layer."""
        return self.num_loops if self.per_loop_routers else 1
