"""LOOM for transformers: a looped mixture of experts (arXiv 2610.01153), as trained by titan_loom.

The cache has an entry for every layer and loop or, with `kv_cache = "shared"`, for every layer: then the tokens of one
call see each other's keys and values of the same loop, and those of earlier calls as the last loop left them. One entry
more tells padding from tokens. `num_loops`, an argument of `forward` and `generate`, replaces the number of loops.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from .configuration_loom import LoomConfig


def rho(v, eps):
    """v / sqrt(mean(v^2) + eps) over the last dimension."""
    return F.rms_norm(v, v.shape[-1:], eps=eps)


def weight_sum(beta, updates):
    """D after n updates D <- beta D + 1 from 0."""
    return updates if beta == 1 else (1 - beta**updates) / (1 - beta)


def rope_tables(positions, head_dim, theta, dtype):
    """Cosines and sines, (2, batch, seq, 1, head_dim / 2), of `positions`: (batch, seq)."""
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=dtype, device=positions.device) / head_dim)
    angles = positions[..., None, None].to(dtype) * frequencies
    return torch.stack((angles.cos(), angles.sin()))


def apply_rope(x, tables):
    """Turn the pairs (i, i + head_dim / 2) of x: (batch, seq, heads, head_dim)."""
    cos, sin = tables
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


def attention_mask_of(is_token, seq):
    """(batch, 1, seq, length) bool: what the last `seq` of `is_token`, (batch, length), see. Padding sees itself."""
    index = torch.arange(is_token.shape[1], device=is_token.device)
    query = index[-seq:, None]
    return ((index <= query) & is_token[:, None, None, :]) | (index == query)


class Past:
    """A cache as this model fills it: keys and values of each layer, or each visit, then what is a token."""

    def __init__(self, cache, num_layers, num_loops, is_shared):
        self.cache, self.num_layers, self.num_loops, self.is_shared = cache, num_layers, num_loops, is_shared
        self.length = num_layers * (1 if is_shared else num_loops)
        if any(type(layer) is not DynamicLayer for layer in cache.layers):
            raise ValueError("LOOM needs a DynamicCache, without quantization or a fixed length")
        if cache.get_seq_length() == 0:
            cache.layers[:] = [DynamicLayer() for _ in range(self.length + 1)]
        elif len(cache.layers) != self.length + 1:
            raise ValueError("the cache was filled with another num_loops or kv_cache")

    def is_token(self, is_token):
        """What is a token of all so far, (batch, past + seq), once `is_token`, (batch, seq), has been added."""
        flags = is_token[:, None, :, None]
        return self.cache.update(flags, flags[..., :0], self.length)[0][:, 0, :, 0].bool()

    def keys_and_values(self, k, v, loop, layer):
        """Those that loop `loop` of `layer` sees, k and v, (batch, heads, seq, head_dim), being the new ones."""
        if not self.is_shared:
            return self.cache.update(k, v, loop * self.num_layers + layer)
        if loop == self.num_loops - 1:
            return self.cache.update(k, v, layer)
        past = self.cache.layers[layer]
        if not past.is_initialized:
            return k, v
        return torch.cat((past.keys, k), dim=-2), torch.cat((past.values, v), dim=-2)


class LoomAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.head_dim = config.head_dim
        self.sizes = (config.num_attention_heads * self.head_dim,) * 2 + (
            config.num_key_value_heads * self.head_dim,
        ) * 2
        self.projection = nn.Linear(config.hidden_size, sum(self.sizes), bias=False)
        self.output = nn.Linear(self.sizes[0], config.hidden_size, bias=False)

    def forward(self, u, kv_state, rope, mask, past, loop, layer):
        """u, kv_state: (batch, seq, dim). mask: (batch, 1, seq, past + seq) bool, or None where causality is all."""
        if kv_state is None:
            g, q, k, v = self.projection(u).split(self.sizes, dim=-1)
        else:
            of_u, of_state = self.projection.weight.split((2 * self.sizes[0], 2 * self.sizes[-1]))
            g, q = F.linear(u, of_u).chunk(2, dim=-1)
            k, v = F.linear(kv_state, of_state).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))
        q, k, v = (t.transpose(1, 2) for t in (apply_rope(q, rope), apply_rope(k, rope), v))
        if past is not None:
            k, v = past.keys_and_values(k, v, loop, layer)
        is_causal = mask is None and q.shape[2] > 1
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=True)
        return self.output(g.sigmoid() * a.transpose(1, 2).flatten(-2))


class LoomKeyValueGate(nn.Module):
    """s_t = g * s_{t-1} + (1 - g) * u_t, with g = sigmoid(W [s_{t-1}; u_t] + b), and s_1 = u_1 (arXiv 2605.07721)."""

    def __init__(self, config):
        super().__init__()
        self.gate = nn.Linear(2 * config.hidden_size, config.hidden_size)

    def forward(self, state, u):
        if state is None:
            return u
        g = self.gate(torch.cat((state, u), dim=-1)).sigmoid()
        return g * state + (1 - g) * u


class LoomFeedForward(nn.Module):
    def __init__(self, dim, ffn_dim):
        super().__init__()
        self.gate = nn.Linear(dim, ffn_dim, bias=False)
        self.up = nn.Linear(dim, ffn_dim, bias=False)
        self.down = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LoomExperts(nn.Module):
    def __init__(self, config):
        super().__init__()
        dim, expert_dim = config.hidden_size, config.moe_intermediate_size
        self.top_k = config.num_experts_per_tok
        self.gate_up = nn.Parameter(torch.empty(config.num_experts, 2 * expert_dim, dim))
        self.down = nn.Parameter(torch.empty(config.num_experts, dim, expert_dim))
        shared = config.num_shared_experts
        self.shared = LoomFeedForward(dim, shared * expert_dim) if shared else None

    def forward(self, x, router, bias):
        """The experts' sum for x: (tokens, dim), in fp32 at least; router: (experts, dim), bias: (experts,)."""
        scores = F.linear(x.to(bias.dtype), router.to(bias.dtype)).sigmoid()
        selected = (scores.detach() + bias).topk(self.top_k).indices
        gates = scores.gather(-1, selected)
        gates = gates / gates.sum(-1, keepdim=True)
        y = x.new_zeros(*selected.shape, x.shape[-1])
        for expert, (gate_up, down) in enumerate(zip(self.gate_up.unbind(0), self.down.unbind(0), strict=True)):
            token, place = (selected == expert).nonzero(as_tuple=True)
            if len(token):
                gate, up = F.linear(x[token], gate_up).chunk(2, dim=-1)
                y[token, place] = F.linear(F.silu(gate) * up, down)
        out = (gates.unsqueeze(-1) * y).sum(1)
        return out if self.shared is None else out + self.shared(x)


class LoomBlock(GradientCheckpointingLayer):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.attention = LoomAttention(config)
        self.kv_gate = LoomKeyValueGate(config) if config.kv_gate else None
        self.experts = LoomExperts(config)
        self.branch_norm = nn.Parameter(torch.empty(config.hidden_size)) if config.ffn_branch_norm else None

    def forward(self, x, n_l, n_h, d_l, d_h, router, bias, rope, kv_state, mask, past, loop, layer):
        """x: the stream; n_l, n_h: the decayed sums of attention's writes, and d_l, d_h: of their weights."""
        config, eps = self.config, self.config.rms_norm_eps
        u = rho(x, eps)
        if self.kv_gate is not None:
            kv_state = self.kv_gate(kv_state, u)
        a = config.gamma * self.attention(u, kv_state, rope, mask, past, loop, layer).to(n_l.dtype)
        n_l = config.layer_beta * n_l + a
        r_l = n_l / d_l
        n_h = config.loop_beta * n_h + r_l
        y = x + n_h / d_h + r_l if config.looping_residual else x + a
        v = rho(y, eps).to(x.dtype)
        branch = self.experts(v.flatten(0, 1), router, bias).view_as(y)
        if self.branch_norm is not None:
            branch = self.branch_norm * rho(branch, eps)
        return rho(y + config.gamma * branch, eps).to(x.dtype), n_l, n_h, kv_state


class LoomPreTrainedModel(PreTrainedModel):
    config_class = LoomConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ("LoomBlock",)
    _supports_sdpa = True

    @torch.no_grad()
    def _init_weights(self, module):
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 1:
                init.constant_(parameter, 1.0 if name == "branch_norm" else 0.0)
            else:
                init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        if isinstance(module, LoomModel):
            init.zeros_(module.router_bias_steps)


class LoomModel(LoomPreTrainedModel):
    """Token ids to the hidden state after the last loop."""

    def __init__(self, config):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(LoomBlock(config) for _ in range(config.num_layers))
        shape = (config.num_layers, config.num_experts)
        routers = (torch.empty(*shape, config.hidden_size) for _ in range(config.num_routers))
        self.routers = nn.ParameterList(map(nn.Parameter, routers))
        self.register_buffer("router_bias_steps", torch.zeros(shape, dtype=torch.int64))
        self.post_init()

    def get_input_embeddings(self):
        return self.embedding

    def set_input_embeddings(self, value):
        self.embedding = value

    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        cache=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        num_loops=None,
        **kwargs,
    ):
        """The hidden state, (batch, seq, dim), of `input_ids`: (batch, seq), which follow what the cache holds.

        `attention_mask`, (batch, past + seq) or (batch, seq), is 0 for padding, on whichever side; of tokens that the
        cache holds already, what it said then counts. `past_key_values` is another name of `cache`.
        """
        config = self.config
        if kwargs.get("output_attentions") or kwargs.get("output_hidden_states"):
            raise ValueError("LOOM returns neither attentions nor hidden states of its visits")
        num_loops = config.num_loops if num_loops is None else num_loops
        if num_loops < 1:
            raise ValueError(f"num_loops is {num_loops}; it must be 1 or more")
        e = (self.embedding(input_ids) if inputs_embeds is None else inputs_embeds) * math.sqrt(config.hidden_size)
        batch, seq = e.shape[:2]
        if attention_mask is not None and (attention_mask.ndim != 2 or attention_mask.shape[1] < seq):
            raise ValueError("attention_mask must be (batch, length), of all tokens up to now or of the new ones")
        checkpointing = self.training and torch.is_grad_enabled() and self.blocks[0].gradient_checkpointing
        cache = past_key_values if cache is None else cache
        if checkpointing:
            cache = None  # backward would fill it again
        elif cache is None and (config.use_cache if use_cache is None else use_cache):
            cache = DynamicCache()
        past = None if cache is None else Past(cache, config.num_layers, num_loops, config.kv_cache == "shared")

        is_token = torch.ones(batch, seq, dtype=torch.bool, device=e.device)
        if attention_mask is not None:
            is_token = attention_mask[:, -seq:] != 0
        if past is not None:
            is_token = past.is_token(is_token)
        is_padded = (attention_mask is not None or is_token.shape[1] > seq) and not bool(is_token.all())
        if position_ids is None:
            position_ids = (is_token.cumsum(1) - 1).clamp(min=0)[:, -seq:]
        dtype = torch.promote_types(e.dtype, torch.float32)
        rope = rope_tables(position_ids, config.head_dim, config.rope_theta, dtype)
        mask = attention_mask_of(is_token, seq) if is_padded or 1 < seq < is_token.shape[1] else None

        bias = self.router_bias_steps.to(dtype) * config.balance_rate
        layers = torch.arange(1, config.num_layers + 1, dtype=dtype, device=e.device)
        z, n_h, kv = e, torch.zeros_like(e, dtype=dtype), [None] * config.num_layers
        for loop in range(num_loops):
            g = config.injection(loop)
            x = torch.lerp(z, e, g) if g else z
            n_l = torch.zeros_like(n_h)
            d_l = weight_sum(config.layer_beta, layers)
            d_h = weight_sum(config.loop_beta, loop * config.num_layers + layers)
            routers = self.routers[min(loop, config.num_routers - 1)]
            for layer, block in enumerate(self.blocks):
                x, n_l, n_h, kv[layer] = block(
                    x,
                    n_l,
                    n_h,
                    d_l[layer],
                    d_h[layer],
                    routers[layer],
                    bias[layer],
                    rope,
                    kv[layer],
                    mask,
                    past,
                    loop,
                    layer,
                )
            z = rho(x, config.rms_norm_eps)
        return BaseModelOutputWithPast(last_hidden_state=z, cache=cache)


class LoomForCausalLM(LoomPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {}  # noqa: RUF012

    def __init__(self, config):
        super().__init__(config)
        self.model = LoomModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        cache=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        num_loops=None,
        logits_to_keep=0,
        **kwargs,
    ):
        """As `LoomModel`. `labels`, (batch, seq), are shifted here; -100 is ignored."""
        known = {name: kwargs.pop(name, None) for name in ("output_attentions", "output_hidden_states")}
        output = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            num_loops=num_loops,
            **known,
        )
        hidden = output.last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, cache=output.cache)
