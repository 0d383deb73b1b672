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
from titan_loom.models.layers.document_mask import Documents, positions_in_documents
from titan_loom.models.loom import FLAVORS
from titan_loom.models.loom.args import LoomArgs
from titan_loom.models.loom.model import Loom

DEBUG = FLAVORS["debug"]
TINY = replace(DEBUG, vocab_size=61, dim=24, num_heads=3, head_dim=8, num_experts=5, expert_dim=12, max_seq_len=32)
SWITCHES = ["residual_scale", "embed_inject", "looping_residual", "ffn_branch_norm", "per_loop_routers"]
GATED = replace(TINY, kv_gate=True)


def meta(args: LoomArgs) -> Loom:
    with torch.device("meta"):
        return build_model(args)


def initialized(args: LoomArgs, seed: int = 0) -> Loom:
    model = meta(args)
    materialize(model, torch.device("cpu"), seed)
    return model


def trained(args: LoomArgs) -> Loom:
    """A model in fp64 in which every parameter and buffer matters: none is 0, 1, or equal to another."""
    model = initialized(args).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3 + 0.05)
        model.router_bias_steps.random_(-200, 200, generator=generator)
    return model


def tokens(batch: int = 2, seq: int = 12, vocab_size: int = TINY.vocab_size) -> torch.Tensor:
    return torch.randint(0, vocab_size, (batch, seq), generator=torch.Generator().manual_seed(2))


def rho(v: torch.Tensor) -> torch.Tensor:
    return v / (v.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def reference(model: Loom, ids: torch.Tensor, num_loops: int | None = None, cuts: tuple[int, ...] = ()) -> list:
    """z_1 to z_H by the equations, token by token, head by head, expert by expert, from the parameters alone.

    No gradient passes from a loop in `cuts`, counted from 0, to the ones before it.
    """
    args, p = model.args, dict(model.named_parameters())
    seq, layers, trained_loops = ids.shape[1], args.num_layers, args.num_loops
    bias = args.balance_rate * model.router_bias_steps.double()
    gamma = args.residual_lambda / (trained_loops * math.sqrt(layers)) if args.residual_scale else 1.0

    def turn(x):  # (batch, seq, head_dim)
        turned, half = torch.empty_like(x), args.head_dim // 2
        for position in range(seq):
            for i in range(half):
                cos, sin = (f(position * args.rope_theta ** (-2 * i / args.head_dim)) for f in (math.cos, math.sin))
                a, b = x[:, position, i], x[:, position, half + i]
                turned[:, position, i], turned[:, position, half + i] = a * cos - b * sin, a * sin + b * cos
        return turned

    def attention(u, s, block):
        d, of_q, of_kv = args.head_dim, args.num_heads * args.head_dim, args.num_kv_heads * args.head_dim
        w_g, w_q, w_k, w_v = p[f"{block}.attention.projection.weight"].split([of_q, of_q, of_kv, of_kv])
        outputs = []
        for head in range(args.num_heads):
            shared = head // (args.num_heads // args.num_kv_heads)
            q = turn(u @ w_q[head * d : (head + 1) * d].T)
            k = turn(s @ w_k[shared * d : (shared + 1) * d].T)
            v = s @ w_v[shared * d : (shared + 1) * d].T
            scores = (q @ k.transpose(1, 2) / math.sqrt(d)).masked_fill(torch.ones(seq, seq).triu(1).bool(), -math.inf)
            outputs.append(scores.softmax(-1) @ v)
        gated = torch.cat(outputs, -1) / (1 + torch.exp(-(u @ w_g.T)))
        return gated @ p[f"{block}.attention.output.weight"].T

    def expert(v, gate, up, down):
        h = gate @ v
        return down @ (h / (1 + torch.exp(-h)) * (up @ v))

    def mixture(v, block, router, b):
        gate_up, down = p[f"{block}.experts.gate_up"], p[f"{block}.experts.down"]
        shared = [p[f"{block}.experts.shared.{name}.weight"] for name in ("gate", "up", "down")]
        rows = []
        for token in v.flatten(0, 1):
            scores = 1 / (1 + torch.exp(-(router @ token)))
            selected = sorted(range(args.num_experts), key=lambda e: -(scores[e] + b[e]).item())[: args.top_k]
            row, total = 0, sum(scores[e] for e in selected)
            for e in selected:
                gate, up = gate_up[e][: args.expert_dim], gate_up[e][args.expert_dim :]
                row = row + scores[e] / total * expert(token, gate, up, down[e])
            for j in range(args.num_shared_experts):
                of_j = slice(j * args.expert_dim, (j + 1) * args.expert_dim)
                row = row + expert(token, shared[0][of_j], shared[1][of_j], shared[2][:, of_j])
            rows.append(row)
        return torch.stack(rows).view_as(v)

    e = math.sqrt(args.dim) * p["embedding.weight"][ids]
    n_h, d_h, states, z, zs = 0, 0, {}, None, []
    for t in range(1, (num_loops or trained_loops) + 1):
        if t - 1 in cuts:
            z, n_h = z.detach(), n_h.detach() if args.looping_residual else 0
            states = {layer: state.detach() for layer, state in states.items()}
        g = min(max(args.residual_lambda / (t * math.sqrt(layers)), 0), 1) if args.embed_inject else 0
        x = e if t == 1 else (1 - g) * z + g * e if g else z
        n_l, d_l = 0, 0
        for layer in range(layers):
            block = f"blocks.{layer}"
            u = s = rho(x)
            if args.kv_gate and t > 1:
                w, b = p[f"{block}.kv_gate.gate.weight"], p[f"{block}.kv_gate.gate.bias"]
                share = 1 / (1 + torch.exp(-(torch.cat([states[layer], u], -1) @ w.T + b)))
                s = share * states[layer] + (1 - share) * u
            states[layer] = s
            a = gamma * attention(u, s, block)
            if args.looping_residual:
                n_l, d_l = args.layer_beta * n_l + a, args.layer_beta * d_l + 1
                n_h, d_h = args.loop_beta * n_h + n_l / d_l, args.loop_beta * d_h + 1
                y = x + n_h / d_h + n_l / d_l
            else:
                y = x + a
            router = p[f"routers.{min(t, trained_loops) - 1 if args.per_loop_routers else 0}"][layer]
            branch = mixture(rho(y), block, router, bias[layer])
            if args.ffn_branch_norm:
                branch = p[f"{block}.branch_norm"] * rho(branch)
            x = rho(y + gamma * branch)
        z = rho(x)
        zs.append(z)
    return zs


def loss(model: Loom, hidden: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model.logits(hidden).flatten(0, 1), tokens(seq=hidden.shape[1], vocab_size=60).flatten())


def gradients(model: Loom, value: torch.Tensor) -> dict[str, torch.Tensor | None]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(value, parameters, allow_unused=True), strict=True))


def assert_equal_gradients(found: dict, expected: dict) -> None:
    for name, wanted in expected.items():
        if wanted is None:
            assert found[name] is None, name
        else:
            assert (found[name] - wanted).norm() <= 1e-9 * wanted.norm() + 1e-15, name


@pytest.mark.parametrize(
    ("flavor", "total"),
    [
        ("loom_329m", 313_863_168),
        ("loom_1p7b", 1_644_913_920),
        ("barbados", 112_237_056),
        ("barbados-base", 110_465_280),
        ("debug", 1_255_808),
    ],
)
def test_flavors_have_their_exact_counts(flavor, total):
    parts = meta(FLAVORS[flavor]).parameter_parts()
    assert parts.pop("total") == total
    assert sum(parts.values()) - parts["active"] == total


@pytest.mark.parametrize(
    ("flavor", "fixed", "by_loop", "active"),
    [("loom_329m", 312_480_768, 153_600, 73_559_040), ("loom_1p7b", 1_639_729_920, 576_000, 452_793_600)],
)
def test_only_routers_grow_with_the_number_of_loops(flavor, fixed, by_loop, active):
    for num_loops in (1, 3, 6, 12):
        parts = meta(replace(FLAVORS[flavor], num_loops=num_loops)).parameter_parts()
        assert (parts["total"], parts["active"]) == (fixed + by_loop * num_loops, active)
    shared = meta(replace(FLAVORS[flavor], per_loop_routers=False)).parameter_parts()
    assert (shared["total"], shared["active"]) == (fixed + by_loop, active)


def test_published_scales():
    args = FLAVORS["loom_329m"]
    assert args.gamma == pytest.approx(0.017568, abs=5e-7)
    assert FLAVORS["loom_1p7b"].gamma == pytest.approx(0.014344, abs=5e-7)
    assert [args.injection(loop) for loop in (0, 1, 2, 3)] == pytest.approx([1, 0.0791, 0.0527, 0.0395], abs=5e-5)


VARIANTS = [
    TINY,
    *(replace(TINY, **{switch: False}) for switch in SWITCHES),
    replace(TINY, residual_lambda=3.0, layer_beta=0.3, loop_beta=0.8, num_loops=2),
    replace(TINY, layer_beta=0.0, loop_beta=1.0, num_loops=2, num_shared_experts=3),
    GATED,
]


@pytest.mark.parametrize("args", [*VARIANTS, DEBUG], ids=range(len(VARIANTS) + 1))
def test_hidden_states_of_every_loop_are_those_of_the_equations(args):
    model, ids = trained(args), tokens(seq=8)
    with torch.no_grad():
        output, expected = model(ids, every_loop=True), reference(model, ids)
    torch.testing.assert_close(output.readouts, tuple(expected), rtol=0, atol=1e-9)
    assert torch.equal(output.hidden, output.readouts[-1])
    assert output.hidden.square().mean(-1).sub(1).abs().max() < 1e-5


@pytest.mark.parametrize("num_loops", [1, 5])
def test_another_number_of_loops_keeps_gamma_and_uses_the_last_router(num_loops):
    model, ids = trained(TINY), tokens(seq=8)
    with torch.no_grad():
        torch.testing.assert_close(
            model(ids, num_loops).hidden, reference(model, ids, num_loops)[-1], rtol=0, atol=1e-9
        )
    with pytest.raises(UserError, match="num_loops is 0"):
        model(ids, 0)


@pytest.mark.parametrize(
    "args", [TINY, GATED, replace(TINY, embed_inject=False)], ids=["loom", "gated", "not injected"]
)
@pytest.mark.parametrize("segment_loops", [1, 2, 3])
def test_segments_differentiate_their_own_loops_only(args, segment_loops):
    model, ids = trained(args), tokens(seq=6)
    starts, carried, output = range(0, 3, segment_loops), (), None
    for start in starts:
        segment = Segment(start, min(start + segment_loops, 3))
        output = model(ids, segment=segment, carried=carried)
        carried = output.carried
        expected = reference(model, ids, segment.stop, cuts=(start,) if start else ())[-1]
        torch.testing.assert_close(output.hidden, expected, rtol=0, atol=1e-9)
        found, wanted = gradients(model, loss(model, output.hidden)), gradients(model, loss(model, expected))
        assert_equal_gradients(found, wanted)
        unused = {int(name.split(".")[1]) for name, g in found.items() if name.startswith("routers.") and g is None}
        assert unused == set(range(3)) - set(range(*segment))
    full = model(ids)
    torch.testing.assert_close(output.hidden, full.hidden, rtol=0, atol=0)
    assert all(not t.requires_grad for t in full.carried)


@pytest.mark.parametrize("backprop_loops", [1, 2, 4])
def test_truncated_backprop_differentiates_the_last_loops_only(backprop_loops):
    model, ids = trained(GATED), tokens(seq=6)
    hidden = model(ids, None, backprop_loops).hidden
    expected = reference(model, ids, cuts=(3 - backprop_loops,))[-1]
    assert_equal_gradients(gradients(model, loss(model, hidden)), gradients(model, loss(model, expected)))


def test_the_looping_residual_remembers_a_write_for_some_visits():
    """The first write counts twice, and so does a constant one; a single one fades."""

    def response(writes):
        block = trained(replace(TINY, num_loops=1)).blocks[0]
        zero = torch.zeros(1, 1, TINY.dim, dtype=torch.float64)
        n_l, n_h, results = zero, zero, []
        for i, write in enumerate(writes, start=1):
            d = torch.tensor(2 - 2 ** (1 - i), dtype=torch.float64)
            block.attention.forward = lambda *_, write=write: zero + write / block.args.gamma
            visit = block(zero, n_l, n_h, d, d, torch.zeros(5, TINY.dim).double(), torch.zeros(5).double(), None)
            n_l, n_h = visit.n_l, visit.n_h
            results.append(((n_l / d)[0, 0, 0].item(), (n_h / d)[0, 0, 0].item()))
        return results

    faded = [(1, 1), (0.333, 0.556), (0.143, 0.320), (0.067, 0.185), (0.032, 0.106)]
    for found, expected in zip(response([1, 0, 0, 0, 0]), faded, strict=True):
        assert found == pytest.approx(expected, abs=6e-4)
    for found in response([1, 1, 1, 1, 1]):
        assert found == pytest.approx((1, 1))


class Recorder:
    def __init__(self):
        self.blocks, self.loops, self.selected = {}, {}, {}

    def after_block(self, loop, layer, x):
        self.blocks[loop, layer] = x

    def after_loop(self, loop, z):
        self.loops[loop] = z

    def routing(self, loop, layer, selected):
        self.selected[loop, layer] = selected


def test_an_observer_sees_every_visit_and_the_stream_has_unit_rms_after_it():
    model, ids, seen = initialized(TINY), tokens(), Recorder()
    with torch.no_grad():
        output = model(ids, segment=Segment(1, 3), carried=model(ids, 1).carried, observer=seen)
    assert list(seen.blocks) == list(seen.selected) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert list(seen.loops) == [1, 2]
    for x in seen.blocks.values():
        assert x.square().mean(-1).sqrt().sub(1).abs().max() < 1e-5
    counts = [
        sum(torch.bincount(seen.selected[loop, layer].flatten(), minlength=5) for loop in (1, 2)) for layer in (0, 1)
    ]
    assert torch.equal(output.expert_load, torch.stack(counts))
    assert torch.equal(seen.loops[2], output.hidden)


def documents(*first: int, seq: int = 12, padding: torch.Tensor | None = None) -> Documents:
    is_first = torch.zeros(1, seq, dtype=torch.bool)
    is_first[0, list(first)] = True
    return Documents(positions_in_documents(is_first), None, padding)


@pytest.mark.parametrize("args", [TINY, GATED], ids=["loom", "gated"])
def test_a_document_gets_what_it_gets_alone(args):
    model, ids = trained(args), tokens(batch=1)
    with torch.no_grad():
        together = model(ids, documents=documents(0, 5)).hidden
        alone = model(ids[:, 5:], documents=documents(0, seq=7)).hidden
    torch.testing.assert_close(together[:, 5:], alone, rtol=0, atol=1e-12)
    changed = ids.clone()
    changed[:, :5] = 7
    with torch.no_grad():
        assert torch.equal(model(changed, documents=documents(0, 5)).hidden[:, 5:], together[:, 5:])


def test_no_token_sees_a_later_one():
    model, ids = trained(TINY), tokens()
    changed = ids.clone()
    changed[:, 7] = (changed[:, 7] + 1) % TINY.vocab_size
    difference = (model(ids).hidden - model(changed).hidden).abs().amax((0, 2))
    assert difference[:7].max() < 1e-13
    assert difference[7:].min() > 1e-6


def test_padding_counts_nowhere():
    model, ids = trained(TINY), tokens(batch=1)
    padding = torch.arange(12).unsqueeze(0) >= 9
    full, padded = model(ids, documents=documents(0, 9)), model(ids, documents=documents(0, 9, padding=padding))
    alone = model(ids[:, :9], documents=documents(0, seq=9))
    assert torch.equal(padded.expert_load, alone.expert_load)
    assert padded.expert_load.sum() == 9 * TINY.top_k * 2 * 3 < full.expert_load.sum()
    torch.testing.assert_close(padded.router_z[:, :9], alone.router_z, rtol=1e-12, atol=0)


def test_the_routers_z_is_the_mean_over_layers_and_loops():
    model, ids = initialized(replace(TINY, num_layers=1, num_loops=1)).double(), tokens()
    logits, experts = [], model.blocks[0].experts
    experts.register_forward_hook(lambda _, args, __: logits.append(args[0] @ args[1].T))
    z = [model(ids, n).router_z for n in (1, 2)]
    expected = [value.logsumexp(-1).square().view(ids.shape) for value in logits]
    torch.testing.assert_close(z, [expected[0], (expected[1] + expected[2]) / 2])
    assert gradients(model, z[0].mean())["routers.0"].abs().max() > 0


def test_biases_move_by_exactly_one_step_towards_an_even_load():
    model = initialized(TINY).bfloat16()
    model.balance_experts(torch.tensor([[9, 4, 0, 2, 5], [4, 4, 4, 4, 4]]))
    model.balance_experts(torch.tensor([[9, 4, 4, 1, 2], [0, 20, 0, 0, 0]]))
    assert model.router_bias_steps.tolist() == [[-2, 0, 1, 2, 0], [1, -1, 1, 1, 1]]
    assert model.router_bias.dtype == torch.float32
    assert model.router_bias[0].tolist() == pytest.approx([-0.004, 0, 0.002, 0.004, 0])


def test_biases_even_out_the_load_of_a_planted_router():
    """benchmarks/balance.py does the same in training."""
    model, ids, variations = initialized(TINY), tokens(), []
    for router in model.routers:
        router.data[:, 0] += 1
    for _ in range(100):
        with torch.no_grad():
            load = model(ids).expert_load
        model.balance_experts(load)
        variations.append((load.double().std(-1, correction=0) / load.double().mean(-1)).mean().item())
    assert sum(variations[-10:]) / 10 < variations[0] / 2


def test_a_bias_selects_but_does_not_weigh():
    model, ids = trained(replace(TINY, top_k=5)), tokens()
    before = model(ids).hidden
    model.router_bias_steps += torch.randint(-500, 500, (2, 5))
    torch.testing.assert_close(model(ids).hidden, before, rtol=0, atol=1e-12)


def test_initial_values():
    args = replace(DEBUG, vocab_size=500, num_experts=30, num_shared_experts=2, expert_dim=80, kv_gate=True)
    model = meta(args)
    expected = {
        "embedding.weight": 64**-0.5,
        "head.weight": 64**-0.5,
        "blocks.1.attention.projection.weight": 64**-0.5,
        "blocks.1.experts.gate_up": 64**-0.5,
        "blocks.1.experts.down": 80**-0.5,
        "blocks.1.experts.shared.down.weight": 80**-0.5,
        "blocks.1.kv_gate.gate.weight": 128**-0.5,
        "routers.2": 64**-0.5,
    }
    values = {}
    for name, parameter in model.named_parameters():
        if name.startswith(("routers.", "blocks.1.")) or name in expected:
            values[name] = torch.empty(parameter.shape)
            model.init_parameter(name, values[name], lambda name: torch.Generator().manual_seed(sum(name.encode())))
    for name, std in expected.items():
        assert values[name].std().item() == pytest.approx(std, rel=0.04), name
        assert name.startswith("routers.") or values[name].abs().max() <= 3 * std * 1.001
    assert torch.equal(values["routers.2"], values["routers.0"])
    assert not torch.equal(*values["routers.0"])
    assert values["blocks.1.branch_norm"].unique().tolist() == [1]
    assert values["blocks.1.kv_gate.gate.bias"].unique().tolist() == [0]
    assert initialized(TINY).router_bias_steps.abs().max() == 0


@pytest.mark.parametrize("args", [TINY, replace(GATED, ffn_branch_norm=False)], ids=["loom", "gated"])
@pytest.mark.parametrize(
    ("num_loops", "backprop_loops", "segment"), [(None, None, None), (4, 1, None), (3, None, (1, 3))]
)
def test_flops_equal_what_torch_counts(args, num_loops, backprop_loops, segment):
    model, ids = initialized(args), tokens()
    carried = model(ids, segment[0]).carried if segment else ()
    segment = segment and Segment(*segment)
    formulas = {
        torch.ops.titan_loom.expert_sum: lambda x, gates, w, *_, **__: 3 * math.prod(gates) * w[1] * w[2],
        torch.ops.titan_loom.expert_sum_backward: lambda _, x, gates, w, *__, **___: 6 * math.prod(gates) * w[1] * w[2],
    }
    counter = FlopCounterMode(display=False, custom_mapping=formulas)
    with sdpa_kernel(SDPBackend.MATH), counter:
        model.logits(model(ids, num_loops, backprop_loops, segment=segment, carried=carried).hidden).sum().backward()
    per_token = model.flops_per_token(ids.shape[1], num_loops, backprop_loops, segment)
    assert counter.get_total_flops() == ids.numel() * per_token


def test_bf16_stays_close_and_repeats_to_the_bit():
    exact, ids = initialized(TINY), tokens(seq=32)
    model = initialized(TINY).bfloat16()
    output = model(ids)
    assert (output.hidden.dtype, output.router_z.dtype) == (torch.bfloat16, torch.float32)
    assert output.carried[1].dtype == torch.float32
    assert torch.equal(output.hidden, model(ids).hidden)
    expected = exact(ids).hidden
    assert (output.hidden.float() - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 6}, "model.args.top_k is 6; it must be at most num_experts = 5"),
        ({"loop_beta": 1.5}, "model.args.loop_beta is 1.5; it must be from 0 to 1"),
        ({"capacity_factor": 0.0}, "model.args.capacity_factor is 0.0; it must be greater than 0"),
    ],
)
def test_arguments_that_describe_no_model(change, message):
    with pytest.raises(UserError, match=message):
        replace(TINY, **change)
