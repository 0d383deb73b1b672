"""What decoding with each cache of a LOOM costs in memory and in loss.

`per_loop` keeps keys and values of every loop and computes what one pass over the text does. `shared` keeps those of
the last loop: a token sees earlier ones as their last loop left them, so it has to be read token by token.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_loom.data.lanes import IGNORED_LABEL
from titan_loom.hub.evaluate_gate import Parts, measure


class CacheResult(NamedTuple):
    """What one cache costs and gives."""

    kv_cache: str
    bytes_per_token: int
    loss: float
    """Mean over tokens, in nats."""


def compare_caches(
    model: nn.Module, parts: Parts, max_tokens: int, num_loops: int | None = None
) -> tuple[list[CacheResult], int]:
    """`per_loop` and `shared` on the first `max_tokens` tokens of `parts`, and how many of them were predicted."""
    parts = first_tokens(parts, max_tokens)
    per_loop, count = measure(model, parts, num_loops)
    with kv_cache(model, "shared"):
        shared = sum(token_by_token(model, *part, num_loops) for part in parts)
    nats = {"per_loop": per_loop, "shared": shared}
    return [CacheResult(name, bytes_per_token(model, name, num_loops), nats[name] / count) for name in nats], count


def bytes_per_token(model: nn.Module, kv_cache: str, num_loops: int | None = None) -> int:
    """What a cache keeps of a token, in the weights' dtype: 2 * num_kv_heads * head_dim numbers, its keys and values,
    for each layer and, with `per_loop`, each loop. The byte that tells tokens from padding is not counted."""
    config = model.config
    entries = config.num_layers * ((num_loops or config.num_loops) if kv_cache == "per_loop" else 1)
    return 2 * config.num_key_value_heads * config.head_dim * entries * model.dtype.itemsize


@contextmanager
def kv_cache(model: nn.Module, name: str) -> Iterator[None]:
    """Let `model` decode with the cache `name`."""
    own, model.config.kv_cache = model.config.kv_cache, name
    try:
        yield
    finally:
        model.config.kv_cache = own


@torch.no_grad()
def token_by_token(model: nn.Module, tokens: Tensor, labels: Tensor, num_loops: int | None = None) -> float:
    """The sum of the cross-entropy, in nats, when a cache gets `tokens`, (n,), one at a time, as generation does."""
    nats, cache = 0.0, None
    for token, label in zip(tokens.to(model.device), labels.to(model.device), strict=True):
        output = model(token[None, None], cache=cache, use_cache=True, num_loops=num_loops)
        cache = output.cache
        nats += F.cross_entropy(output.logits[0, 0].float(), label, ignore_index=IGNORED_LABEL, reduction="sum").item()
    return nats


def first_tokens(parts: Parts, count: int) -> Parts:
    """The first `count` tokens of `parts`; the last part may be cut."""
    starts = accumulate((len(tokens) for tokens, _ in parts), initial=0)
    return [
        (tokens[: count - start], labels[: count - start])
        for (tokens, labels), start in zip(parts, starts, strict=False)
        if start < count
    ]
