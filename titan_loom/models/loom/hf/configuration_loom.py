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

    def __init__(
        self,
        vocab_size=49152,
        hidden_size=512,
        num_layers=10,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=30,
        num_shared_experts=2,
        num_experts_per_tok=6,
        moe_intermediate_size=512,
        num_loops=9,
        max_position_embeddings=1023,
        rope_theta=10000.0,
        rms_norm_eps=1e-6,
        residual_lambda=0.5,
        layer_beta=0.5,
        loop_beta=0.5,
        residual_scale=True,
        embed_inject=True,
        looping_residual=True,
        ffn_branch_norm=True,
        per_loop_routers=True,
        kv_gate=False,
        kv_cache="per_loop",
        capacity_factor=None,
        balance_rate=2e-3,
        use_cache=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.num_experts = num_experts
        self.num_shared_experts = num_shared_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.moe_intermediate_size = moe_intermediate_size
        self.num_loops = num_loops
        self.max_position_embeddings = max_position_embeddings
        self.rope_theta = rope_theta
        self.rms_norm_eps = rms_norm_eps
        self.residual_lambda = residual_lambda
        self.layer_beta = layer_beta
        self.loop_beta = loop_beta
        self.residual_scale = residual_scale
        self.embed_inject = embed_inject
        self.looping_residual = looping_residual
        self.ffn_branch_norm = ffn_branch_norm
        self.per_loop_routers = per_loop_routers
        self.kv_gate = kv_gate
        self.kv_cache = kv_cache
        self.capacity_factor = capacity_factor
        self.balance_rate = balance_rate
        self.use_cache = use_cache
        kwargs.pop("num_hidden_layers", None)
        self.num_hidden_layers = num_layers if kv_cache == "shared" else num_layers * num_loops
        super().__init__(
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **kwargs,
        )

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
