"""NanoCoder for transformers: a looped transformer with an n-gram memory, as trained by titan_loom.

Layers run in the order of the configuration's schedule, so the cache has an entry for every *visit* (execution of a
layer), one for the token ids that n-grams are hashed from and, with the gated refresh, one for every visit's
convolution. `num_loops`, an argument of `forward` and `generate`, replaces the trained number of loops.

Padding is an id of -1 from the start: it is no key to any query, no part of an n-gram, and zero to the convolution.
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

from .configuration_nanocoder import NanoCoderConfig

KERNEL_SIZE = 9
FILLER = -1
HISTORY = 3  # ids before the current one that the longest n-gram reads
MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64  # 2^64 / golden ratio, odd, as a signed integer


def ngram_rows(ids, num_rows, order):
    """Rows, (batch, seq), of the windows of `order` ids that end at each of ids[:, 3:]; ids: (batch, 3 + seq) int64.

    In 64-bit integers, oldest id first: h <- order; for each id: h <- (h XOR id) * MULTIPLIER; h <- h XOR (h >> 32).
    """
    seq = ids.shape[1] - HISTORY
    h = torch.full_like(ids[:, HISTORY:], order)
    for back in reversed(range(order)):
        h = (h ^ ids[:, HISTORY - back : HISTORY - back + seq]) * MULTIPLIER
        h = h ^ ((h >> 32) & (2**32 - 1))  # >> copies the sign; the mask makes it shift in zeros
    return (h & (2**63 - 1)) % num_rows


def rope_tables(positions, head_dim, theta):
    """Cosines and sines, (2, batch, seq, 1, head_dim / 2) fp32, of `positions`: (batch, seq)."""
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim)
    angles = positions[..., None, None].float() * frequencies
    return torch.stack((angles.cos(), angles.sin()))


def apply_rope(x, tables, interleaved):
    """Turn the pairs of x: (batch, seq, heads, head_dim)."""
    cos, sin = tables
    pair_axis = -1 if interleaved else -2
    a, b = x.unflatten(-1, (-1, 2) if interleaved else (2, -1)).unbind(pair_axis)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), pair_axis).flatten(-2).to(x.dtype)


class HistoryLayer(DynamicLayer):
    """A cache entry that keeps the last few of what it is given: what a causal convolution still reads."""

    is_croppable = False

    def update(self, key_states, value_states, *args, **kwargs):
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        self.keys = keys[..., 1 - KERNEL_SIZE :, :].clone()
        self.values = values[..., 1 - KERNEL_SIZE :, :]
        return keys, values

    def crop(self, tokens_to_remove):
        if tokens_to_remove != 0:
            raise ValueError("the convolution's history in this cache cannot be taken back")


class Past:
    """A cache as this model fills it: keys and values of each visit, then the ids, then each visit's history."""

    def __init__(self, cache, num_visits, gated):
        self.cache, self.num_visits = cache, num_visits
        length = 1 + num_visits * (2 if gated else 1)
        if any(type(layer) not in (DynamicLayer, HistoryLayer) for layer in cache.layers):
            raise ValueError("NanoCoder needs a DynamicCache, without quantization or a fixed length")
        if cache.get_seq_length() == 0:
            cache.layers[:] = [DynamicLayer() for _ in range(num_visits + 1)]
            cache.layers += [HistoryLayer() for _ in range(length - num_visits - 1)]
        elif len(cache.layers) != length:
            raise ValueError("the cache was filled with another num_loops")

    def ids(self, ids):
        """All ids so far, (batch, past + seq), once `ids`, (batch, seq), have been added."""
        return self._append(ids[:, None, :, None], self.num_visits)[:, 0, :, 0]

    def keys_and_values(self, k, v, visit):
        return self.cache.update(k, v, visit)

    def history(self, n, visit):
        """The last vectors before n, and n: (batch, at most 8 + seq, dim)."""
        return self._append(n[:, None], self.num_visits + 1 + visit)[:, 0]

    def _append(self, x, index):
        return self.cache.update(x, x[..., :0], index)[0]


class NanoCoderAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        dim, head_dim = config.hidden_size, config.head_dim
        self.head_dim, self.rope_interleaved = head_dim, config.rope_interleaved
        self.query = nn.Linear(dim, config.num_attention_heads * head_dim, bias=False)
        self.key = nn.Linear(dim, config.num_key_value_heads * head_dim, bias=False)
        self.value = nn.Linear(dim, config.num_key_value_heads * head_dim, bias=False)
        self.output = nn.Linear(config.num_attention_heads * head_dim, dim, bias=False)
        self.query_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)
        self.key_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)

    def forward(self, x, rope, mask, past, visit):
        """x: (batch, seq, dim). mask: (batch, 1, seq, past + seq) bool, or None where plain causality says it all."""
        heads = (-1, self.head_dim)
        q = apply_rope(self.query_norm(self.query(x).unflatten(-1, heads)), rope, self.rope_interleaved)
        k = apply_rope(self.key_norm(self.key(x).unflatten(-1, heads)), rope, self.rope_interleaved)
        v = self.value(x).unflatten(-1, heads)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if past is not None:
            k, v = past.keys_and_values(k, v, visit)
        is_causal = mask is None and q.shape[2] > 1
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=True)
        return self.output(a.transpose(1, 2).flatten(-2))


class NanoCoderGatedRefresh(nn.Module):
    def __init__(self, config):
        super().__init__()
        dim = config.hidden_size
        self.attention_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)
        self.embedding_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)
        self.output_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)
        self.gate = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)
        self.kernel = nn.Parameter(torch.empty(dim, KERNEL_SIZE))

    def forward(self, x0, a, is_token, past, visit):
        """x0, a: (batch, seq, dim). is_token: (batch, seq, 1) bool, or None without padding."""
        n = self.attention_norm(a.detach())
        if is_token is not None:
            n = n * is_token
        seen = n if past is None else past.history(n, visit)
        padded = F.pad(seen.transpose(1, 2), (KERNEL_SIZE - 1, 0))[..., 1 - KERNEL_SIZE - n.shape[1] :]
        g = self.gate(n) + F.conv1d(padded, self.kernel.unsqueeze(1), groups=len(self.kernel)).transpose(1, 2)
        return self.output_norm(self.output(F.silu(g) * self.value(self.embedding_norm(x0))))


class NanoCoderFeedForward(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class NanoCoderBlock(GradientCheckpointingLayer):
    def __init__(self, config):
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(()))
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attention = NanoCoderAttention(config)
        self.refresh = NanoCoderGatedRefresh(config) if config.refresh == "gated" else None
        self.feed_forward_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.feed_forward = NanoCoderFeedForward(config)

    def forward(self, x, x0, rope, mask, is_token, past, visit):
        if self.refresh is None:
            x = x + self.alpha * x0
        a = self.attention(self.attention_norm(x), rope, mask, past, visit)
        x = x + a
        if self.refresh is not None:
            x = x + self.alpha * self.refresh(x0, a, is_token, past, visit)
        return x + self.feed_forward(self.feed_forward_norm(x))


class NanoCoderNgramMemory(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.injection_scales = nn.Parameter(torch.empty(len(config.injections())))
        self.bigram_table = nn.Embedding(config.ngram_rows, config.ngram_dim)
        self.fourgram_table = nn.Embedding(config.ngram_rows, config.ngram_dim)
        self.out_proj = nn.Linear(2 * config.ngram_dim, config.hidden_size, bias=False)

    def forward(self, ids):
        """ids: (batch, 3 + seq) int64, -1 for padding and before the start. Returns (batch, seq, dim)."""
        bigram = self.bigram_table(ngram_rows(ids, self.bigram_table.num_embeddings, 2))
        fourgram = self.fourgram_table(ngram_rows(ids, self.fourgram_table.num_embeddings, 4))
        return self.out_proj(torch.cat((bigram, fourgram), dim=-1))


class NanoCoderPreTrainedModel(PreTrainedModel):
    config_class = NanoCoderConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ("NanoCoderBlock",)
    _supports_sdpa = True

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, NanoCoderModel):
            init.normal_(module.embedding.weight, std=self.config.hidden_size**-0.5)  # x0 has unit RMS
        elif isinstance(module, NanoCoderNgramMemory):
            init.constant_(module.injection_scales, 0.5)
        elif isinstance(module, NanoCoderBlock):
            init.zeros_(module.alpha)
            std = self.config.initializer_range / math.sqrt(2 * self.config.num_hidden_layers)
            for linear in (module.attention.output, module.feed_forward.down):
                init.normal_(linear.weight, std=std)
        elif isinstance(module, NanoCoderGatedRefresh):
            init.normal_(module.kernel, std=self.config.initializer_range)


class NanoCoderModel(NanoCoderPreTrainedModel):
    """Token ids to the normalised hidden state."""

    def __init__(self, config):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.ngram = NanoCoderNgramMemory(config)
        self.blocks = nn.ModuleList(NanoCoderBlock(config) for _ in range(config.num_layers))
        self.final_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
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
        use_cache=None,
        num_loops=None,
        **kwargs,
    ):
        """The hidden state, (batch, seq, dim), of `input_ids`: (batch, seq), which follow what the cache holds.

        `attention_mask`, (batch, past + seq) or (batch, seq), is 0 for padding, on whichever side; of tokens that the
        cache holds already, what it said then counts. `past_key_values` is another name of `cache`.
        """
        config = self.config
        if input_ids is None or kwargs.get("inputs_embeds") is not None:
            raise ValueError("NanoCoder needs input_ids: its n-gram memory reads the ids themselves")
        if kwargs.get("output_attentions") or kwargs.get("output_hidden_states"):
            raise ValueError("NanoCoder returns neither attentions nor hidden states of its visits")
        if attention_mask is not None and (attention_mask.ndim != 2 or attention_mask.shape[1] < input_ids.shape[1]):
            raise ValueError("attention_mask must be (batch, length), of all tokens up to now or of the new ones")
        checkpointing = self.training and torch.is_grad_enabled() and self.blocks[0].gradient_checkpointing
        cache = past_key_values if cache is None else cache
        if checkpointing:
            cache = None  # backward would fill it again
        elif cache is None and (config.use_cache if use_cache is None else use_cache):
            cache = DynamicCache()
        visits = config.visits(num_loops)
        past = None if cache is None else Past(cache, len(visits), config.refresh == "gated")

        seq = input_ids.shape[1]
        new = input_ids
        if attention_mask is not None:
            new = input_ids.where(attention_mask[:, -seq:] != 0, FILLER)
        ids = new if past is None else past.ids(new)
        is_padded = (attention_mask is not None or ids.shape[1] > seq) and bool((ids < 0).any())
        if position_ids is None:
            position_ids = ((ids >= 0).cumsum(1) - 1).clamp(min=0)[:, -seq:]
        rope = rope_tables(position_ids, config.head_dim, config.rope_theta)
        mask = attention_mask_of(ids, seq) if is_padded or 1 < seq < ids.shape[1] else None
        is_token = (new >= 0).unsqueeze(-1) if is_padded else None

        x = x0 = self.embedding(new.clamp(min=0)) * math.sqrt(config.hidden_size)
        u = self.ngram(F.pad(ids, (HISTORY, 0), value=FILLER)[:, -HISTORY - seq :])
        injections = config.injections(num_loops)
        for visit, layer in enumerate(visits):
            if visit in injections:
                x = x + self.ngram.injection_scales[injections[visit]] * u
            x = self.blocks[layer](x, x0, rope, mask, is_token, past, visit)
        return BaseModelOutputWithPast(last_hidden_state=self.final_norm(x), cache=cache)


def attention_mask_of(ids, seq):
    """(batch, 1, seq, length) bool: what the last `seq` of `ids`, (batch, length), see. Padding sees only itself."""
    index = torch.arange(ids.shape[1], device=ids.device)
    query = index[-seq:, None]
    return ((index <= query) & (ids >= 0)[:, None, None, :]) | (index == query)


class NanoCoderForCausalLM(NanoCoderPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embedding.weight"}  # noqa: RUF012

    def __init__(self, config):
        super().__init__(config)
        self.model = NanoCoderModel(config)
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
        labels=None,
        use_cache=None,
        num_loops=None,
        logits_to_keep=0,
        **kwargs,
    ):
        """As `NanoCoderModel`. `labels`, (batch, seq), are shifted here; -100 is ignored."""
        known = {
            name: kwargs.pop(name, None) for name in ("inputs_embeds", "output_attentions", "output_hidden_states")
        }
        output = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            past_key_values=past_key_values,
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
