"""NanoCoder: a dense pre-norm transformer, some of whose layers run several times, with an n-gram memory.

The schedule (see `args`) says which layer runs when. The token embedding x0 comes back in every visit (`refresh`), the
n-gram memory at the start of every loop. The head is the embedding. There are no buffers, so a model built on the meta
device needs nothing but `init_parameter`; how it is sharded, compiled or trained is not known here.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_loom.models.interface import LoopOutput, Observer, Segment, count_parameters
from titan_loom.models.layers.attention import Attention
from titan_loom.models.layers.document_mask import Documents
from titan_loom.models.layers.embedding import Embedding
from titan_loom.models.layers.feed_forward import SwiGLU
from titan_loom.models.layers.rope import rope_tables
from titan_loom.models.nanocoder.args import NanoCoderArgs, Visits
from titan_loom.models.nanocoder.ngram import NgramMemory
from titan_loom.models.nanocoder.refresh import GatedRefresh

INITIAL_INJECTION_SCALE = 0.5


class NanoCoder(nn.Module):
    """Tokens to the normalised hidden state. `blocks[i]` is physical layer i, called once per visit."""

    def __init__(self, args: NanoCoderArgs):
        super().__init__()
        self.args = args
        self.embedding = Embedding(args.vocab_size, args.dim)
        self.ngram = NgramMemory(
            dim=args.dim, num_rows=args.ngram_rows, columns=args.ngram_dim, num_injections=args.num_injections
        )
        self.blocks = nn.ModuleList(Block(args) for _ in range(args.num_layers))
        self.final_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)

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
        """The final hidden state, (batch, seq, dim), of `tokens`, (batch, seq) int64.

        `num_loops` replaces the trained number of passes over the looped stack. With `backprop_loops`, only that many
        of them, the last, are differentiated; of what runs before, the embedding and the n-gram memory still get
        gradients through later visits, and layers that run nowhere else get none (None, not zeros). With `documents`,
        every document gets what it would get alone, whatever else its row holds.

        A `segment` runs some of the loops, on from what `carried` holds after the loop before them. The prelude belongs
        to the first segment, and the coda reads out the state at the end of each. An `observer` sees the prelude as
        part of the first loop and the coda as part of the last one.

        Raises:
            UserError: when the schedule cannot run `num_loops` times, or has no loops to differentiate.
        """
        args = self.args
        positions = None if documents is None else documents.positions
        rope = rope_tables(tokens.shape[1], args.head_dim, args.rope_theta, tokens.device, positions)
        x0 = self.embedding(tokens) * math.sqrt(args.dim)
        u = self.ngram(tokens, positions=positions)
        prelude, loops, coda = args.plan(num_loops)
        start, stop = segment or (0, len(loops))
        undifferentiated = args.num_undifferentiated(num_loops, backprop_loops)
        is_training = torch.is_grad_enabled()

        def run(function: Callable[..., Tensor], x: Tensor, visits: Visits, loop: int | None) -> Tensor:
            observe = None if observer is None or loop is None else partial(observer.after_block, loop)
            return function(x, x0, u, rope, documents, visits, observe)

        if start:
            (x,) = carried
        else:
            # A compiled block would need another graph for a call in which x is x0, or differs in what needs a
            # gradient.
            x = (x0.detach() if undifferentiated else x0).clone()
            with torch.set_grad_enabled(is_training and not undifferentiated):
                x = run(self.run_visits, x, prelude, 0)
        readouts = []
        for loop in range(start, stop):
            with torch.set_grad_enabled(is_training and 1 + loop >= undifferentiated):
                x = run(self.run_loop, x, loops[loop], loop)
            if observer is not None:
                observer.after_loop(loop, x)
            if every_loop and loop < stop - 1:
                readouts.append(self.final_norm(run(self.run_visits, x, coda, None)))
        hidden = self.final_norm(run(self.run_visits, x, coda, stop - 1))
        return LoopOutput(hidden, (x.detach(),), readouts=(*readouts, hidden) if every_loop else ())

    def run_visits(
        self,
        x: Tensor,
        x0: Tensor,
        u: Tensor,
        rope: Tensor,
        documents: Documents | None,
        visits: Visits,
        observe: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """Run layers one after another; with a scale's index, the n-gram memory u is added before the layer."""
        for layer, scale in visits:
            if scale is not None:
                x = x + self.ngram.injection_scales[scale] * u
            x = self.blocks[layer](x, x0, rope, documents)
            if observe is not None:
                observe(layer, x)
        return x

    def run_loop(self, x: Tensor, *rest) -> Tensor:
        """One pass over the looped stack: `run_visits` under a name of its own, by which a loop can be wrapped."""
        return self.run_visits(x, *rest)

    @property
    def head_weight(self) -> nn.Parameter:
        """The head's matrix, (vocab, dim): the embedding."""
        return self.embedding.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., vocab), in hidden's dtype, of `hidden`: (..., dim)."""
        return F.linear(hidden, self.head_weight)

    def init_parameter(self, name: str, out: Tensor, generator: Callable[[str], torch.Generator]) -> None:
        """Fill `out`, the full fp32 CPU tensor of parameter `name`, with its initial values.

        Random ones are drawn from `generator(name)`: they depend on the name, not on the order of the calls.
        """
        if out.ndim == 1:
            if name.endswith(".alpha"):
                out.zero_()  # a block starts without refresh
            elif name == "ngram.injection_scales":
                out.fill_(INITIAL_INJECTION_SCALE)
            else:
                out.fill_(1.0)  # norms
            return
        std = self.args.init_std
        if name == "embedding.weight":
            std = self.args.dim**-0.5  # x0 = embedding * sqrt(dim) has unit RMS
        elif name.endswith(("attention.output.weight", "feed_forward.down.weight")):
            std /= math.sqrt(2 * self.args.num_visits)  # every visit adds two of these to the stream
        out.normal_(0.0, std, generator=generator(name))

    def group_rules(self) -> dict[str, Callable[[str, Tensor], bool]]:
        """Optimizer group -> whether a parameter, by its name and number of dimensions, is a member."""
        return {
            "muon": lambda name, parameter: name.startswith("blocks.") and parameter.ndim == 2,
            "embeddings": lambda name, parameter: name == "embedding.weight",
            "ngram": lambda name, parameter: name.startswith("ngram."),
            "controls": lambda name, parameter: not name.startswith("ngram.") and parameter.ndim <= 1,
        }

    def parameter_parts(self) -> dict[str, int]:
        """Parameters by part; what is shared counts once. `transformer` is everything but `ngram`."""
        total, ngram = count_parameters(self), count_parameters(self.ngram)
        parts = {name: count_parameters(getattr(self, name)) for name in ("embedding", "blocks", "final_norm")}
        return {"total": total, "transformer": total - ngram, "ngram": ngram, **parts}

    def flops_per_token(
        self,
        seq_len: int,
        num_loops: int | None = None,
        backprop_loops: int | None = None,
        segment: Segment | None = None,
    ) -> int:
        """Floating-point operations of forward and backward per token of a sequence of `seq_len`.

        Matrix products only, two operations per multiply-add, backward twice forward and only for the visits that
        `backprop_loops` leaves to differentiate, attention as if not causal, a layer once per visit, no recomputation.
        Depthwise convolution, norms and look-ups count nothing. With `segment`, those of this segment.
        """
        args = self.args
        matrices = sum(module.weight.numel() for module in self.blocks[0].modules() if isinstance(module, nn.Linear))
        attention = 2 * args.num_heads * args.head_dim * seq_len  # multiply-adds of scores and of weighted values
        outside = self.ngram.out_proj.weight.numel() + self.head_weight.numel()
        visits = [len(stage.layers) for stage in args.stages(num_loops)]
        if segment is not None:
            prelude = visits[0] if segment.start == 0 else 0
            visits = [prelude, *visits[1 + segment.start : 1 + segment.stop], visits[-1]]
        differentiated = sum(visits[args.num_undifferentiated(num_loops, backprop_loops) :])
        return (2 * sum(visits) + 4 * differentiated) * (matrices + attention) + 6 * outside


class Block(nn.Module):
    """One layer: x, x0: (batch, seq, dim), RoPE tables and, if any, documents -> x: (batch, seq, dim).

    Takes nothing but tensors, and holds no number of its own, so that one compiled graph serves every layer and visit.
    """

    def __init__(self, args: NanoCoderArgs):
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(1))  # one element, but not 0-dimensional: FSDP2 cannot shard those
        self.attention_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.attention = Attention(
            dim=args.dim,
            num_heads=args.num_heads,
            num_kv_heads=args.num_kv_heads,
            head_dim=args.head_dim,
            norm_eps=args.norm_eps,
            rope_interleaved=args.rope_interleaved,
        )
        self.refresh = GatedRefresh(args.dim, args.norm_eps) if args.refresh == "gated" else None
        self.feed_forward_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.feed_forward = SwiGLU(args.dim, args.ffn_dim)

    def forward(self, x: Tensor, x0: Tensor, rope: Tensor, documents: Documents | None = None) -> Tensor:
        if self.refresh is None:
            x = x + self.alpha * x0
        a = self.attention(self.attention_norm(x), rope, documents)
        x = x + a
        if self.refresh is not None:
            x = x + self.alpha * self.refresh(x0, a, None if documents is None else documents.positions)
        return x + self.feed_forward(self.feed_forward_norm(x))
