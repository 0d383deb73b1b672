"""LOOM: a mixture of experts whose layers all run H times, each time with a router of its own (arXiv 2610.01153).

    e       = sqrt(d) Emb[token]
    x_{1,0} = e;   x_{t,0} = (1 - g_t) z_{t-1} + g_t e        g_t = min(lambda / (t sqrt(L)), 1)
    x_{t,l} = Block_l(x_{t,l-1}; router t of layer l)
    z_t     = rho(x_{t,L});   logits = W_head z_t             rho(v) = v / sqrt(mean(v^2) + eps)

Routers and their biases lie outside the blocks: a block is the same in all loops, and so is its compiled graph. How the
model is sharded, compiled or trained is not known here.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_loom.models.interface import LoopOutput, Observer, Segment, count_parameters
from titan_loom.models.layers.document_mask import Documents
from titan_loom.models.layers.embedding import Embedding
from titan_loom.models.layers.mixture_of_experts import MixtureOfExperts
from titan_loom.models.layers.rope import rope_tables
from titan_loom.models.loom.args import LoomArgs
from titan_loom.models.loom.attention import GatedAttention, KeyValueGate

TRUNCATION = 3.0  # standard deviations at which initial values are cut


class LoopState(NamedTuple):
    """What a loop leaves to the next one."""

    z: Tensor
    """(batch, seq, dim)"""
    n_h: Tensor
    """(batch, seq, dim), fp32 at least: N_H, the decayed sum of the layers' r_L since the first loop."""
    kv: tuple[Tensor, ...]
    """Each layer's state of keys and values, (batch, seq, dim); none before the first loop, and without the gate."""


class RoutingStats(NamedTuple):
    """Sums over what ran."""

    z: Tensor
    """(tokens,), fp32 at least: logsumexp(router logits)^2."""
    load: Tensor
    """(layers, experts) int64"""

    def __add__(self, other: "RoutingStats") -> "RoutingStats":
        return RoutingStats(self.z + other.z, self.load + other.load)


class Loom(nn.Module):
    """Tokens to the hidden state z_H. `blocks[i]` is physical layer i, `routers[t][i]` its router in loop t, from 0."""

    def __init__(self, args: LoomArgs):
        super().__init__()
        self.args = args
        self.embedding = Embedding(args.vocab_size, args.dim)
        self.blocks = nn.ModuleList(Block(args) for _ in range(args.num_layers))
        routers = (torch.empty(args.num_layers, args.num_experts, args.dim) for _ in range(args.num_routers))
        self.routers = nn.ParameterList(map(nn.Parameter, routers))
        # In steps of `balance_rate`: an integer, which no dtype rounds, however small the step.
        self.register_buffer("router_bias_steps", torch.zeros(args.num_layers, args.num_experts, dtype=torch.int64))
        self.head = nn.Linear(args.dim, args.vocab_size, bias=False)

    def forward(
        self,
        tokens: Tensor,
        num_loops: int | None = None,
        backprop_loops: int | None = None,
        documents: Documents | None = None,
        *,
        segment: Segment | None = None,
        carried: tuple[Tensor, ...] = (),
        every_loop: bool = False,
        observer: Observer | None = None,
    ) -> LoopOutput:
        """The hidden state after the last loop, z of `tokens`, (batch, seq) int64.

        `num_loops` replaces the trained number of loops. With `backprop_loops`, only that many of them, the last, are
        differentiated. With `documents`, every document gets what it would get alone, whatever else its row holds. A
        `segment` runs some of the loops, on from what `carried` holds after the loop before them: z, N_H and, with the
        gate, every layer's state of keys and values. Routers of loops that are not differentiated get no gradient
        (None, not zeros).

        Raises:
            UserError: `num_loops` is below 1.
        """
        args, dtype = self.args, self._dtype
        start, stop = segment or (0, len(args.stages(num_loops)))
        first_differentiated = start if backprop_loops is None else max(stop - backprop_loops, start)
        positions = None if documents is None else documents.positions
        rope = rope_tables(tokens.shape[1], args.head_dim, args.rope_theta, tokens.device, positions, dtype)
        e = self.embedding(tokens) * math.sqrt(args.dim)
        if start == 0:
            state = LoopState(e, torch.zeros_like(e, dtype=dtype), ())
        else:
            state = LoopState(carried[0], carried[1], carried[2:])
        is_training, stats, readouts = torch.is_grad_enabled(), None, []
        for loop in range(start, stop):
            with torch.set_grad_enabled(is_training and loop >= first_differentiated):
                if loop == first_differentiated:
                    state = _differentiable(state, keep_z=loop == 0)
                state, of_loop = self.run_loop(e, state, rope, documents, loop, observer)
            stats = of_loop if stats is None else stats + of_loop
            if observer is not None:
                observer.after_loop(loop, state.z)
            if every_loop:
                readouts.append(state.z)
        return LoopOutput(
            hidden=state.z,
            carried=tuple(t.detach() for t in (state.z, state.n_h, *state.kv)),
            router_z=stats.z.view(tokens.shape) / (args.num_layers * (stop - start)),
            expert_load=stats.load,
            readouts=tuple(readouts),
        )

    def run_loop(
        self,
        e: Tensor,
        state: LoopState,
        rope: Tensor,
        documents: Documents | None,
        loop: int,
        observer: Observer | None = None,
    ) -> tuple[LoopState, RoutingStats]:
        """Loop number `loop`, counted from 0: one pass over all layers."""
        args, dtype = self.args, self._dtype
        g = args.injection(loop)
        # One operation in every loop: the first block always gets a tensor of its own, with a gradient.
        x = torch.lerp(state.z, e, g) if g else state.z
        n_l = 0 * x.to(dtype)  # not just zeros, since to a compiled block those would be another kind of input
        n_h, kv = state.n_h, []
        layers = torch.arange(1, args.num_layers + 1, dtype=dtype, device=x.device)
        d_l = _weight_sum(args.layer_beta, layers)
        d_h = _weight_sum(args.loop_beta, loop * args.num_layers + layers)
        # A copy: a view of a parameter has requires_grad even where nothing is differentiated.
        routers = self.routers[min(loop, args.num_routers - 1)].clone().unbind(0)
        bias = self.router_bias
        zs, loads = [], []
        for layer, block in enumerate(self.blocks):
            of_layer = state.kv[layer] if state.kv else None
            visit = block(x, n_l, n_h, d_l[layer], d_h[layer], routers[layer], bias[layer], rope, documents, of_layer)
            x, n_l, n_h = visit.x, visit.n_l, visit.n_h
            zs.append(visit.router_z)
            loads.append(visit.load)
            if visit.kv is not None:
                kv.append(visit.kv)
            if observer is not None:
                observer.routing(loop, layer, visit.selected)
                observer.after_block(loop, layer, x)
        return LoopState(_rho(x, args.norm_eps), n_h, tuple(kv)), RoutingStats(sum(zs), torch.stack(loads))

    @property
    def router_bias(self) -> Tensor:
        """b: what is added to the experts' scores when they are selected, (layers, experts), fp32 at least."""
        return self.router_bias_steps.to(self._dtype) * self.args.balance_rate

    @torch.no_grad()
    def balance_experts(self, load: Tensor) -> None:
        """Move each expert's bias by one step towards an even load.

        `load`, (layers, experts): the tokens of each expert in the whole data step, over all ranks, micro-batches and
        loops.
        """
        load = load.to(torch.int64)
        self.router_bias_steps += torch.sign(load.sum(-1, keepdim=True) - load.shape[-1] * load)  # of mean - load

    @property
    def _dtype(self) -> torch.dtype:
        """dtype of what is computed in fp32 at least."""
        return torch.promote_types(self.head_weight.dtype, torch.float32)

    @property
    def head_weight(self) -> nn.Parameter:
        """The head's matrix, (vocab, dim)."""
        return self.head.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., vocab), in hidden's dtype, of `hidden`: (..., dim)."""
        return self.head(hidden)

    def init_parameter(self, name: str, out: Tensor, generator: Callable[[str], torch.Generator]) -> None:
        """Fill `out`, the full fp32 CPU tensor of parameter `name`, with its initial values.

        Random ones are drawn from `generator(name)`: they depend on the name, not on the order of the calls.
        """
        if out.ndim == 1:
            out.fill_(1.0 if name.endswith("branch_norm") else 0.0)  # else the bias of the key-value gate
            return
        if name.startswith("routers."):  # all loops start with the same ones
            out.normal_(0.0, self.args.dim**-0.5, generator=generator("routers.0"))
            return
        # Shared experts are as wide as one of them: that they are computed together is no reason to start smaller.
        fan_in = self.args.expert_dim if name.endswith("shared.down.weight") else out.shape[-1]
        std = fan_in**-0.5
        nn.init.trunc_normal_(out, std=std, a=-TRUNCATION * std, b=TRUNCATION * std, generator=generator(name))

    def init_buffer(self, name: str, out: Tensor) -> None:
        """Fill `out`, a full CPU tensor like buffer `name`, with its initial values."""
        out.zero_()

    def group_rules(self) -> dict[str, Callable[[str, Tensor], bool]]:
        """Optimizer group -> whether a parameter, by its name and number of dimensions, is a member."""
        return {
            "muon": lambda name, parameter: name.startswith(("blocks.", "routers.")) and parameter.ndim >= 2,
            "embeddings": lambda name, parameter: name in ("embedding.weight", "head.weight"),
            "controls": lambda name, parameter: parameter.ndim <= 1,
        }

    def parameter_parts(self) -> dict[str, int]:
        """Parameters by part. `active`: of the blocks and routers, those that a token meets in one loop."""
        args = self.args
        parts = {name: count_parameters(getattr(self, name)) for name in ("embedding", "head", "blocks", "routers")}
        experts = sum(block.experts.gate_up.numel() + block.experts.down.numel() for block in self.blocks)
        idle = experts // args.num_experts * (args.num_experts - args.top_k)
        active = parts["blocks"] - idle + parts["routers"] // args.num_routers
        return {"total": sum(parts.values()), **parts, "active": active}

    def flops_per_token(
        self,
        seq_len: int,
        num_loops: int | None = None,
        backprop_loops: int | None = None,
        segment: Segment | None = None,
    ) -> int:
        """Floating-point operations of forward and backward per token of a sequence of `seq_len`.

        Matrix products only, two operations per multiply-add, backward twice forward and only for the loops that
        `backprop_loops` leaves to differentiate, attention as if not causal, the selected and the shared experts,
        a layer once per visit, no recomputation. With `segment`, those of this segment, its readout included.
        """
        args = self.args
        start, stop = segment or (0, len(args.stages(num_loops)))
        block = dict(self.blocks[0].named_parameters())
        gate = block["kv_gate.gate.weight"].numel() if args.kv_gate else 0
        vectors = sum(parameter.numel() for parameter in block.values() if parameter.ndim == 1)
        matrices = self.parameter_parts()["active"] // args.num_layers - vectors - gate
        visit = matrices + 2 * args.num_heads * args.head_dim * seq_len  # and the scores and the weighted values
        loops = [args.num_layers * (visit + gate * (loop > 0)) for loop in range(start, stop)]
        differentiated = loops if backprop_loops is None else loops[max(len(loops) - backprop_loops, 0) :]
        return 2 * sum(loops) + 4 * sum(differentiated) + 6 * self.head_weight.numel()


class Visit(NamedTuple):
    """What a block returns."""

    x: Tensor
    """(batch, seq, dim)"""
    n_l: Tensor
    """(batch, seq, dim), fp32 at least"""
    n_h: Tensor
    """(batch, seq, dim), fp32 at least"""
    kv: Tensor | None
    """(batch, seq, dim); None without the gate"""
    router_z: Tensor
    """(tokens,), fp32 at least"""
    load: Tensor
    """(experts,) int64"""
    selected: Tensor
    """(tokens, k) int64"""


class Block(nn.Module):
    """One layer:

        a    = gamma Attn(rho(x))
        N_L <- beta_L N_L + a;     r_L = N_L / D_L        D counts what N has added up, with the same weights
        N_H <- beta_H N_H + r_L;   r_H = N_H / D_H
        y    = x + r_H + r_L
        x   <- rho(y + gamma (w * rho(MoE(rho(y)))))

    The stream is in the dtype of the parameters; sums are in fp32 at least. Takes nothing but tensors, and holds no
    number of its own, so that one compiled graph serves every layer and loop (with the key-value gate, another one the
    first loop).
    """

    def __init__(self, args: LoomArgs):
        super().__init__()
        self.args = args
        self.attention = GatedAttention(
            dim=args.dim, num_heads=args.num_heads, num_kv_heads=args.num_kv_heads, head_dim=args.head_dim
        )
        self.kv_gate = KeyValueGate(args.dim) if args.kv_gate else None
        self.experts = MixtureOfExperts(
            dim=args.dim,
            num_experts=args.num_experts,
            num_shared_experts=args.num_shared_experts,
            top_k=args.top_k,
            expert_dim=args.expert_dim,
            capacity_factor=args.capacity_factor,
        )
        self.branch_norm = nn.Parameter(torch.empty(args.dim)) if args.ffn_branch_norm else None  # w

    def forward(
        self,
        x: Tensor,
        n_l: Tensor,
        n_h: Tensor,
        d_l: Tensor,
        d_h: Tensor,
        router: Tensor,
        router_bias: Tensor,
        rope: Tensor,
        documents: Documents | None = None,
        kv: Tensor | None = None,
    ) -> Visit:
        """d_l, d_h: 0-dimensional; router: (experts, dim); router_bias: (experts,); the others as in `Visit`."""
        args = self.args
        u = _rho(x, args.norm_eps)
        if self.kv_gate is not None:
            kv = self.kv_gate(kv, u)
        a = args.gamma * self.attention(u, rope, documents, kv).to(n_l.dtype)
        n_l = args.layer_beta * n_l + a
        r_l = n_l / d_l
        n_h = args.loop_beta * n_h + r_l
        y = x + n_h / d_h + r_l if args.looping_residual else x + a
        padding = None if documents is None or documents.padding is None else documents.padding.flatten()
        v = _rho(y, args.norm_eps).to(x.dtype)
        out, routing = self.experts(v.flatten(0, 1), router, router_bias, padding)
        branch = out.view_as(y)
        if self.branch_norm is not None:
            branch = self.branch_norm * _rho(branch, args.norm_eps)
        x = _rho(y + args.gamma * branch, args.norm_eps).to(x.dtype)
        return Visit(x, n_l, n_h, kv, routing.z, routing.load, routing.selected)


def _rho(v: Tensor, eps: float) -> Tensor:
    """v / sqrt(mean(v^2) + eps) over the last dimension."""
    return F.rms_norm(v, v.shape[-1:], eps=eps)


def _weight_sum(beta: float, updates: Tensor) -> Tensor:
    """D after n updates D <- beta D + 1 from 0: (1 - beta^n) / (1 - beta)."""
    return updates if beta == 1 else (1 - beta**updates) / (1 - beta)


def _differentiable(state: LoopState, *, keep_z: bool) -> LoopState:
    """`state` as the start of what is differentiated, as if it had a gradient: to a compiled block it then is the same
    kind of input as in other loops. Only with `keep_z` does a gradient go back through z."""

    def leaf(t: Tensor) -> Tensor:
        return t.detach().requires_grad_(torch.is_grad_enabled())

    return LoopState(state.z if keep_z else leaf(state.z), leaf(state.n_h), tuple(map(leaf, state.kv)))
