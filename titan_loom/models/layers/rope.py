"""Rotary position embedding (RoFormer, arXiv 2104.09864): pairs of a head's elements turn by position * frequency.

The two published pairings differ by a permutation of a head's elements, so weights trained with one give nonsense,
quietly, with the other. The tables are computed once per forward, in fp32, and shared by all visits.
"""

import torch
from torch import Tensor


def rope_tables(
    seq_len: int,
    head_dim: int,
    theta: float,
    device: torch.device,
    positions: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Cosines and sines of positions 0 to seq_len - 1: (2, seq, head_dim / 2), in `dtype`.

    With `positions`, (batch, seq) int64 and all below seq_len, those of each token's: (2, batch, seq, head_dim / 2).
    """
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=dtype, device=device) / head_dim)
    angles = torch.outer(torch.arange(seq_len, dtype=dtype, device=device), frequencies)
    tables = torch.stack((angles.cos(), angles.sin()))
    return tables if positions is None else tables[:, positions]


def apply_rope(x: Tensor, tables: Tensor, interleaved: bool) -> Tensor:
    """Turn the pairs of `x`: (batch, seq, heads, head_dim), computed in fp32 at least, returned in x's dtype.

    Args:
        tables: what `rope_tables` gives for x's positions.
        interleaved: a pair is elements (2i, 2i + 1); else (i, i + head_dim / 2).
    """
    cos, sin = tables.unsqueeze(-2)  # (..., seq, 1, head_dim / 2) each, the same for all heads
    pair_axis = -1 if interleaved else -2
    a, b = x.unflatten(-1, (-1, 2) if interleaved else (2, -1)).unbind(pair_axis)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), pair_axis).flatten(-2).to(x.dtype)
