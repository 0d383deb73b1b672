"""Causal grouped-query attention with normalised queries and keys and rotary positions."""

import torch.nn.functional as F
from torch import Tensor, nn

from titan_loom.models.layers.document_attention import document_attention
from titan_loom.models.layers.document_mask import Documents
from titan_loom.models.layers.rope import apply_rope


class Attention(nn.Module):
    """W_o attention(q, k, v): q and k are RMS-normalised per head, then turned by RoPE; scale 1 / sqrt(head_dim).

    Query head i reads key and value head i // (num_heads / num_kv_heads).
    """

    def __init__(
        self, *, dim: int, num_heads: int, num_kv_heads: int, head_dim: int, norm_eps: float, rope_interleaved: bool
    ):
        super().__init__()
        self.head_dim = head_dim
        self.rope_interleaved = rope_interleaved
        self.query = nn.Linear(dim, num_heads * head_dim, bias=False)
        self.key = nn.Linear(dim, num_kv_heads * head_dim, bias=False)
        self.value = nn.Linear(dim, num_kv_heads * head_dim, bias=False)
        self.output = nn.Linear(num_heads * head_dim, dim, bias=False)
        self.query_norm = nn.RMSNorm(head_dim, eps=norm_eps)
        self.key_norm = nn.RMSNorm(head_dim, eps=norm_eps)

    def forward(self, x: Tensor, rope: Tensor, documents: Documents | None = None) -> Tensor:
        """x: (batch, seq, dim); rope: the tables of `rope_tables`. Returns (batch, seq, dim).

        With `documents`, no token sees another document's.
        """
        heads = (-1, self.head_dim)
        q = self.query_norm(self.query(x).unflatten(-1, heads))  # (batch, seq, heads, head_dim)
        k = self.key_norm(self.key(x).unflatten(-1, heads))
        v = self.value(x).unflatten(-1, heads)
        q = apply_rope(q, rope, self.rope_interleaved)
        k = apply_rope(k, rope, self.rope_interleaved)
        return self.output(causal_attention(q, k, v, documents).flatten(-2))


def causal_attention(q: Tensor, k: Tensor, v: Tensor, documents: Documents | None = None) -> Tensor:
    """Attention of q, (batch, seq, heads, head_dim), to k and v, (batch, seq, kv_heads, head_dim); returns q's shape.

    Scale 1 / sqrt(head_dim); query head i reads key and value head i // (heads / kv_heads). With `documents`, no token
    sees another document's.
    """
    if documents is not None:
        return document_attention(q, k, v, documents)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
