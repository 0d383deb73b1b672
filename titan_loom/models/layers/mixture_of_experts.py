"""A mixture of experts (arXiv 2401.06066), balanced by a bias on the selection (arXiv 2408.15664), without dropping.

    s   = sigmoid(W_r v)
    sel = top-k of (s + b)                                      b selects, and does nothing else
    p_e = s_e / sum over sel of s                               the gates
    out = sum over sel of p_e E_e(v) + sum over j of S_j(v)     E, S: SwiGLU

Routing and the sum over experts are in fp32 at least. Pairs of token and expert are sorted by expert, so that each
matrix is applied once to all its tokens. Without a capacity, a token gets what it would get alone.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_loom.models.layers.expert_sum import expert_sum
from titan_loom.models.layers.feed_forward import SwiGLU


class Routing(NamedTuple):
    """Where tokens go."""

    selected: Tensor
    """(tokens, k) int64: each token's experts."""

    gates: Tensor
    """(tokens, k), fp32 at least: their weights, which sum to 1."""

    z: Tensor
    """(tokens,), fp32 at least: logsumexp(logits)^2, for a router z-loss (arXiv 2202.08906)."""

    load: Tensor
    """(experts,) int64: tokens of each expert, padding left out."""


class MixtureOfExperts(nn.Module):
    """Routed and shared experts. The router's weight comes from outside: a looped layer may have several.

    `gate_up`: (experts, 2 expert_dim, dim), W_gate above W_up. `down`: (experts, dim, expert_dim). The shared experts
    are one SwiGLU as wide as all of them.
    """

    def __init__(
        self,
        *,
        dim: int,
        num_experts: int,
        num_shared_experts: int,
        top_k: int,
        expert_dim: int,
        capacity_factor: float | None = None,
    ):
        super().__init__()
        self.top_k = top_k
        self.capacity_factor = capacity_factor
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2 * expert_dim, dim))
        self.down = nn.Parameter(torch.empty(num_experts, dim, expert_dim))
        self.shared = SwiGLU(dim, num_shared_experts * expert_dim) if num_shared_experts else None

    def forward(self, x: Tensor, router: Tensor, bias: Tensor, padding: Tensor | None = None) -> tuple[Tensor, Routing]:
        """The experts' sum for x: (tokens, dim), shaped like x, in fp32 at least, and the routing.

        Args:
            router: (experts, dim).
            bias: (experts,), fp32 at least.
            padding: (tokens,) bool: tokens that are nobody's.
        """
        routing = route(x, router, bias, self.top_k, padding)
        if self.capacity_factor is not None and self.training:
            # floor(factor x an even share) of the tokens
            capacity = math.floor(self.capacity_factor * len(x) * self.top_k / len(self.down))
            routing = routing._replace(gates=gates_within_capacity(routing, capacity, padding))
        out = self.routed(x, routing)
        return (out if self.shared is None else out + self.shared(x)), routing

    def routed(self, x: Tensor, routing: Routing) -> Tensor:
        """The sum of the selected experts, x: (tokens, dim) -> (tokens, dim), in fp32 at least."""
        experts, order = routing.selected.flatten().sort(stable=True)
        every_expert = torch.arange(len(self.down), device=x.device)
        ends = torch.searchsorted(experts, every_expert, right=True, out_int32=True)
        return expert_sum(x, routing.gates, self.gate_up, self.down, order, ends)[0]


def route(x: Tensor, router: Tensor, bias: Tensor, top_k: int, padding: Tensor | None = None) -> Routing:
    """The routing of x: (tokens, dim), by router: (experts, dim) and bias: (experts,)."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    logits = F.linear(x.to(dtype), router.to(dtype))
    scores = logits.sigmoid()
    selected = (scores.detach() + bias).topk(top_k).indices
    gates = scores.gather(-1, selected)
    counted = torch.ones_like(selected) if padding is None else (~padding).long().unsqueeze(-1).expand_as(selected)
    load = selected.new_zeros(len(router)).index_add_(0, selected.flatten(), counted.flatten())
    return Routing(selected, gates / gates.sum(-1, keepdim=True), logits.logsumexp(-1).square(), load)


def gates_within_capacity(routing: Routing, capacity: int, padding: Tensor | None = None) -> Tensor:
    """The gates, (tokens, k), when every expert takes no more than `capacity` tokens, those with the highest gates.

    Gates beyond are 0, and a token's others grow to a sum of 1; if it has no others, all its gates are 0. Padding
    gives way to tokens.
    """
    gates, experts = routing.gates.detach(), routing.selected.flatten()
    if padding is not None:
        gates = gates.masked_fill(padding.unsqueeze(-1), -1.0)
    by_gate = gates.flatten().argsort(descending=True, stable=True)
    experts, by_expert = experts[by_gate].sort(stable=True)
    rank = torch.arange(len(experts), device=experts.device) - torch.searchsorted(experts, experts)
    fits = torch.empty_like(rank, dtype=torch.bool).scatter_(0, by_gate[by_expert], rank < capacity)
    kept = routing.gates * fits.view_as(gates)
    return kept / kept.sum(-1, keepdim=True).clamp(min=torch.finfo(kept.dtype).tiny)
