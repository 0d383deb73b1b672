"""LOOM's attention, with an output gate, and the gate by which Barbados keeps one state of keys and values."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_loom.models.layers.attention import causal_attention
from titan_loom.models.layers.document_mask import Documents
from titan_loom.models.layers.rope import apply_rope


class GatedAttention(nn.Module):
    """W_o(sigmoid(G) * attention(Q, K, V)), with [G; Q; K; V] = W u, and K, V from another state than u if given."""

    def __init__(self, *, dim: int, num_heads: int, num_kv_heads: int, head_dim: int):
        super().__init__()
        self.head_dim = head_dim
        self.sizes = (num_heads * head_dim,) * 2 + (num_kv_heads * head_dim,) * 2
        self.projection = nn.Linear(dim, sum(self.sizes), bias=False)
        self.output = nn.Linear(num_heads * head_dim, dim, bias=False)

    def forward(
        self, u: Tensor, rope: Tensor, documents: Documents | None = None, kv_state: Tensor | None = None
    ) -> Tensor:
        """u and kv_state: (batch, seq, dim); rope: the tables of `rope_tables`. Returns (batch, seq, dim)."""
        if kv_state is None:
            g, q, k, v = self.projection(u).split(self.sizes, dim=-1)
        else:
            of_u, of_state = self.projection.weight.split((2 * self.sizes[0], 2 * self.sizes[-1]))
            g, q = F.linear(u, of_u).chunk(2, dim=-1)
            k, v = F.linear(kv_state, of_state).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))  # (batch, seq, heads, head_dim)
        q, k = (apply_rope(t, rope, interleaved=False) for t in (q, k))
        return self.output(g.sigmoid() * causal_attention(q, k, v, documents).flatten(-2))


class KeyValueGate(nn.Module):
    """s_t = g * s_{t-1} + (1 - g) * u_t, with g = sigmoid(W [s_{t-1}; u_t] + b), and s_1 = u_1 (arXiv 2605.07721)."""

    def __init__(self, dim: int):
        super().__init__()
        self.gate = nn.Linear(2 * dim, dim)

    def forward(self, state: Tensor | None, u: Tensor) -> Tensor:
        """The state of this loop from that of the last one, None in the first, and u; all (batch, seq, dim)."""
        if state is None:
            return u
        g = self.gate(torch.cat((state, u), dim=-1)).sigmoid()
        return g * state + (1 - g) * u
