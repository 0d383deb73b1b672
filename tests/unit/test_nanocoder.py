import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from titan_loom.distributed.init import materialize
from titan_loom.errors import UserError
from titan_loom.models import build_model
from titan_loom.models.interface import Segment
from titan_loom.models.nanocoder import FLAVORS
from titan_loom.models.nanocoder.args import NanoCoderArgs
from titan_loom.models.nanocoder.model import NanoCoder
from titan_loom.models.nanocoder.ngram import ngram_rows

TINY = NanoCoderArgs(
    vocab_size=61,
    dim=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_dim=20,
    prelude=1,
    loop=2,
    coda=1,
    num_loops=2,
    ngram_rows=53,
    ngram_dim=5,
    max_seq_len=32,
)
VARIANTS = [
    TINY,
    replace(TINY, refresh="gated"),
    replace(TINY, rope_interleaved=False),
    replace(TINY, schedule=(0, 1, 1, 2, 0), ngram_visits=(0, 2)),
]


def meta(args: NanoCoderArgs) -> NanoCoder:
    with torch.device("meta"):
        return build_model(args)


def initialized(args: NanoCoderArgs, seed: int = 0) -> NanoCoder:
    model = meta(args)
    materialize(model, torch.device("cpu"), seed)
    return model


def trained(args: NanoCoderArgs) -> NanoCoder:
    """A model in fp64 in which every parameter matters: none is 0, 1 or small."""
    model = initialized(args).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4 + 0.1)
    return model


def tokens(batch: int = 2, seq: int = 12, vocab_size: int = TINY.vocab_size) -> torch.Tensor:
    return torch.randint(0, vocab_size, (batch, seq), generator=torch.Generator().manual_seed(2))


def reference(
    model: NanoCoder, ids: torch.Tensor, num_loops: int | None = None, detach_at: int | None = None
) -> torch.Tensor:
    """The hidden state by the equations, token by token and head by head, from the parameters alone.

    `detach_at`: visit whose input passes no gradient on to earlier visits.
    """
    args, p = model.args, dict(model.named_parameters())
    seq = ids.shape[1]

    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + args.norm_eps).sqrt() * p[f"{name}.weight"]

    def turn(x):  # (batch, seq, head_dim)
        turned = torch.empty_like(x)
        for position in range(seq):
            for i in range(args.head_dim // 2):
                a, b = (2 * i, 2 * i + 1) if args.rope_interleaved else (i, i + args.head_dim // 2)
                angle = position * args.rope_theta ** (-2 * i / args.head_dim)
                turned[:, position, a] = x[:, position, a] * math.cos(angle) - x[:, position, b] * math.sin(angle)
                turned[:, position, b] = x[:, position, a] * math.sin(angle) + x[:, position, b] * math.cos(angle)
        return turned

    def attention(x, block):
        q, k, v = (x @ p[f"{block}.attention.{name}.weight"].T for name in ("query", "key", "value"))
        outputs = []
        for head in range(args.num_heads):
            shared = head // (args.num_heads // args.num_kv_heads)
            of_q = slice(head * args.head_dim, (head + 1) * args.head_dim)
            of_kv = slice(shared * args.head_dim, (shared + 1) * args.head_dim)
            q_head = turn(norm(q[..., of_q], f"{block}.attention.query_norm"))
            k_head = turn(norm(k[..., of_kv], f"{block}.attention.key_norm"))
            scores = q_head @ k_head.transpose(1, 2) / math.sqrt(args.head_dim)
            scores = scores.masked_fill(torch.ones(seq, seq).triu(1).bool(), -math.inf)
            outputs.append(scores.softmax(-1) @ v[..., of_kv])
        return torch.cat(outputs, -1) @ p[f"{block}.attention.output.weight"].T

    def gated_refresh(x0, a, block):
        n = norm(a.detach(), f"{block}.attention_norm")
        kernel = p[f"{block}.kernel"]
        conv = torch.zeros_like(n)
        for t in range(seq):
            for back in range(min(t, 8) + 1):
                conv[:, t] += kernel[:, 8 - back] * n[:, t - back]
        g = n @ p[f"{block}.gate.weight"].T + conv
        v = norm(x0, f"{block}.embedding_norm") @ p[f"{block}.value.weight"].T
        return norm((g * torch.sigmoid(g) * v) @ p[f"{block}.output.weight"].T, f"{block}.output_norm")

    x = x0 = p["embedding.weight"][ids] * math.sqrt(args.dim)
    rows = [ngram_rows(ids, args.ngram_rows, order) for order in (2, 4)]
    tables = (p["ngram.bigram_table.weight"], p["ngram.fourgram_table.weight"])
    u = torch.cat([table[row] for table, row in zip(tables, rows, strict=True)], -1) @ p["ngram.out_proj.weight"].T
    injections = args.injections(num_loops)
    for visit, layer in enumerate(args.visits(num_loops)):
        block = f"blocks.{layer}"
        if visit == detach_at:
            x = x.detach()
        if visit in injections:
            x = x + p["ngram.injection_scales"][injections[visit]] * u
        if args.refresh == "scalar":
            x = x + p[f"{block}.alpha"] * x0
        a = attention(norm(x, f"{block}.attention_norm"), block)
        x = x + a
        if args.refresh == "gated":
            x = x + p[f"{block}.alpha"] * gated_refresh(x0, a, f"{block}.refresh")
        n = norm(x, f"{block}.feed_forward_norm")
        gate, up, down = (p[f"{block}.feed_forward.{name}.weight"] for name in ("gate", "up", "down"))
        g = n @ gate.T
        x = x + (g * torch.sigmoid(g) * (n @ up.T)) @ down.T
    return norm(x, "final_norm")


def loss(model: NanoCoder, hidden: torch.Tensor) -> torch.Tensor:
    logits = hidden @ model.embedding.weight.T
    return F.cross_entropy(logits.flatten(0, 1), tokens(vocab_size=60).flatten())


def assert_equal_gradients(model: NanoCoder, found: torch.Tensor, expected: torch.Tensor) -> None:
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = [torch.autograd.grad(value, parameters, allow_unused=True) for value in (found, expected)]
    for name, gradient, wanted in zip(names, *gradients, strict=True):
        if wanted is None:
            assert gradient is None, name
        else:
            error = (gradient - wanted).norm() / wanted.norm()
            assert error < 1e-4, f"{name}: {error}"  # the RoPE tables are in fp32 by design


@pytest.mark.parametrize(
    ("args", "num_loops"), [*((args, None) for args in VARIANTS), (TINY, 1), (TINY, 5), (VARIANTS[1], 3)]
)
def test_loss_and_gradients_are_those_of_the_equations_unrolled(args, num_loops):
    model, ids = trained(args), tokens()
    hidden, expected = model(ids, num_loops).hidden, reference(model, ids, num_loops)
    torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-5)
    assert_equal_gradients(model, loss(model, hidden), loss(model, expected))


@pytest.mark.parametrize("args", VARIANTS[:2])
@pytest.mark.parametrize("backprop_loops", [1, 2, 3, 4])
def test_truncated_backprop_differentiates_the_last_loops_only(args, backprop_loops):
    model, ids, num_loops = trained(args), tokens(), 3
    first = args.prelude + (num_loops - backprop_loops) * args.loop if backprop_loops < num_loops else None
    hidden, expected = model(ids, num_loops, backprop_loops).hidden, reference(model, ids, num_loops, first)
    torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-5)
    assert_equal_gradients(model, loss(model, hidden), loss(model, expected))


def test_a_fixed_schedule_has_no_loops_to_truncate():
    with pytest.raises(UserError, match="backprop_loops is 1"):
        trained(VARIANTS[3])(tokens(), backprop_loops=1)


@pytest.mark.parametrize("args", VARIANTS[:2])
def test_segments_go_on_where_the_one_before_them_ended_and_pass_no_gradient_back(args):
    model, ids, carried = trained(args), tokens(), ()
    whole = model(ids, 5, every_loop=True)
    assert torch.equal(whole.readouts[-1], whole.hidden)
    for start, stop in [(0, 2), (2, 4), (4, 5)]:
        output = model(ids, 5, segment=Segment(start, stop), carried=carried)
        carried = output.carried
        assert not any(state.requires_grad for state in carried)
        assert torch.equal(output.hidden, whole.readouts[stop - 1])
        # The coda at its place: after `stop` loops.
        expected = reference(model, ids, stop, args.prelude + start * args.loop if start else None)
        assert_equal_gradients(model, loss(model, output.hidden), loss(model, expected))


def test_what_is_read_out_after_every_loop_is_what_so_many_loops_give():
    model, ids = trained(TINY), tokens()
    with torch.no_grad():
        for loop, hidden in enumerate(model(ids, 4, every_loop=True).readouts, start=1):
            torch.testing.assert_close(hidden, model(ids, loop).hidden, rtol=1e-12, atol=1e-12)
        assert len(trained(VARIANTS[3])(ids, every_loop=True).readouts) == 1


class Seen:
    """An observer that writes down what it is shown."""

    def __init__(self):
        self.blocks, self.loops = [], []

    def after_block(self, loop, layer, x):
        self.blocks.append((loop, layer))

    def after_loop(self, loop, z):
        self.loops.append(z)


def test_an_observer_sees_every_visit_and_loop_once():
    model, ids, seen = trained(TINY), tokens(), Seen()
    with torch.no_grad():
        output = model(ids, every_loop=True, observer=seen)
        assert torch.equal(output.hidden, model(ids).hidden)
    assert seen.blocks == [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (1, 3)]
    assert len(seen.loops) == 2 and torch.equal(seen.loops[-1], *output.carried)


@pytest.mark.parametrize("args", VARIANTS[:2])
def test_no_token_sees_a_later_one(args):
    model, ids = trained(args), tokens()
    changed = ids.clone()
    changed[:, 7] = (changed[:, 7] + 1) % args.vocab_size
    difference = (model(ids).hidden - model(changed).hidden).abs().amax((0, 2))
    assert difference[:7].max() == 0
    assert difference[7:].min() > 1e-6


def test_the_head_is_the_embedding():
    model = trained(TINY)
    hidden = model(tokens()).hidden
    assert model.head_weight is model.embedding.weight
    assert torch.equal(model.logits(hidden), F.linear(hidden, model.embedding.weight))


@pytest.mark.parametrize(
    ("flavor", "total", "transformer", "ngram"),
    [
        ("nanocoder", 9_895_690, 7_975_688, 1_920_002),
        ("nanocoder-gated", 9_895_690, 7_975_688, 1_920_002),
        ("minicoder", 24_949_999, 19_950_029, 4_999_970),
        ("minicoder-gated", 24_949_999, 19_950_029, 4_999_970),
    ],
)
def test_flavors_have_their_exact_counts(flavor, total, transformer, ngram):
    parts = meta(FLAVORS[flavor]).parameter_parts()
    assert (parts["total"], parts["transformer"], parts["ngram"]) == (total, transformer, ngram)
    assert parts["embedding"] + parts["blocks"] + parts["final_norm"] == transformer


def test_a_shared_parameter_counts_once():
    model = meta(TINY)
    before = model.parameter_parts()["total"]
    model.head = torch.nn.Linear(TINY.dim, TINY.vocab_size, bias=False, device="meta")
    model.head.weight = model.embedding.weight
    assert model.parameter_parts()["total"] == before


@pytest.mark.parametrize("args", [*VARIANTS, FLAVORS["nanocoder-gated"]])
def test_there_are_no_buffers_and_no_scalar_parameters(args):
    model = meta(args)
    assert not list(model.buffers())
    assert all(parameter.ndim in (1, 2) for parameter in model.parameters())
    assert all(block.alpha.shape == (1,) for block in model.blocks)


def test_initial_values():
    args = FLAVORS["nanocoder-gated"]
    model = initialized(args)
    residual = 0.02 / math.sqrt(2 * 11)
    block = dict(model.blocks[4].named_parameters())
    for name, std in {
        "attention.query.weight": 0.02,
        "attention.output.weight": residual,
        "feed_forward.gate.weight": 0.02,
        "feed_forward.down.weight": residual,
        "refresh.output.weight": 0.02,
        "refresh.kernel": 0.02,
    }.items():
        assert block[name].std().item() == pytest.approx(std, rel=0.05), name
    assert model.ngram.bigram_table.weight.std().item() == pytest.approx(0.02, rel=0.01)
    assert (model.embedding.weight * math.sqrt(args.dim)).square().mean().item() == pytest.approx(1, rel=0.01)
    assert model.ngram.injection_scales.tolist() == [0.5, 0.5]
    assert block["alpha"].tolist() == [0.0]
    norms = [parameter for name, parameter in model.named_parameters() if "norm" in name]
    assert len(norms) == 8 * 7 + 1
    assert all((parameter == 1).all() for parameter in norms)


def test_initial_values_depend_on_seed_and_name_only():
    model, other = initialized(TINY), initialized(TINY, seed=1)
    longer = initialized(replace(TINY, coda=2))
    assert torch.equal(model.blocks[3].attention.query.weight, longer.blocks[3].attention.query.weight)
    assert not torch.equal(model.embedding.weight, other.embedding.weight)
    assert not torch.equal(model.blocks[0].attention.query.weight, model.blocks[1].attention.query.weight)


@pytest.mark.parametrize(
    ("args", "num_loops", "backprop_loops"),
    [
        *((args, None, None) for args in VARIANTS),
        (TINY, 1, None),
        (VARIANTS[1], 3, None),
        *((TINY, 4, k) for k in (1, 3, 4)),
    ],
)
def test_flops_equal_what_torch_counts(args, num_loops, backprop_loops):
    model, ids = initialized(args), tokens()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.logits(model(ids, num_loops, backprop_loops).hidden).sum().backward()
    convolutions = sum(flops for op, flops in counter.get_flop_counts()["Global"].items() if "convolution" in str(op))
    per_token = model.flops_per_token(ids.shape[1], num_loops, backprop_loops)
    assert counter.get_total_flops() - convolutions == ids.numel() * per_token


def test_flops_of_segments_equal_what_torch_counts():
    model, ids, carried = initialized(TINY), tokens(), ()
    for segment in (Segment(0, 2), Segment(2, 3)):
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            output = model(ids, 3, segment=segment, carried=carried)
            model.logits(output.hidden).sum().backward()
        carried = output.carried
        assert counter.get_total_flops() == ids.numel() * model.flops_per_token(ids.shape[1], 3, segment=segment)


@pytest.mark.parametrize("args", VARIANTS[:2])
def test_bf16_stays_close_and_repeats_to_the_bit(args):
    exact, ids = initialized(args), tokens(seq=32)
    model = initialized(args).bfloat16()
    hidden = model(ids).hidden
    assert hidden.dtype == torch.bfloat16
    assert torch.equal(hidden, model(ids).hidden)
    assert (hidden.float() - exact(ids).hidden).norm() < 0.02 * exact(ids).hidden.norm()


def test_the_embeddings_gradient_does_not_lose_a_frequent_token_in_bf16():
    """Summed in bf16, 600 gradients of 1 made 256."""
    model = meta(TINY).to(torch.bfloat16).to_empty(device="cpu")
    model.embedding(torch.zeros(600, dtype=torch.int64)).sum().backward()
    assert model.embedding.weight.grad[0].unique().tolist() == [600.0]
