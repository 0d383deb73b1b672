import pytest
import torch
import torch.nn.functional as F

from titan_loom.models.layers import expert_sum as operators
from titan_loom.models.layers.expert_sum import expert_sum, expert_sum_backward
from titan_loom.models.layers.mixture_of_experts import MixtureOfExperts, Routing, gates_within_capacity

DIM, EXPERTS, TOP_K, WIDTH = 16, 6, 2, 8


def build(dtype: torch.dtype = torch.float32, **options) -> tuple[MixtureOfExperts, torch.Tensor, torch.Tensor]:
    """Experts, a router and a selection bias, all random."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"dim": DIM, "num_experts": EXPERTS, "num_shared_experts": 2, "top_k": TOP_K, "expert_dim": WIDTH}
    experts = MixtureOfExperts(**sizes | options)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(0, 0.4, generator=generator)
    router = torch.randn(EXPERTS, DIM, generator=generator)
    bias = 0.1 * torch.randn(EXPERTS, generator=generator)
    return experts.to(dtype), router.to(dtype).requires_grad_(), bias


def inputs(tokens: int = 50, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(tokens, DIM, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


def by_loop(experts: MixtureOfExperts, x: torch.Tensor, routing: Routing) -> torch.Tensor:
    """The routed experts' sum, one expert after another."""
    out = torch.zeros(x.shape, dtype=routing.gates.dtype)
    weights = zip(experts.gate_up.unbind(0), experts.down.unbind(0), strict=True)
    for expert, (gate_up, down) in enumerate(weights):
        tokens, slot = (routing.selected == expert).nonzero().unbind(1)
        gate, up = F.linear(x[tokens], gate_up).chunk(2, -1)
        y = F.linear(F.silu(gate) * up, down)
        out = out.index_add(0, tokens, routing.gates[tokens, slot].unsqueeze(-1) * y)
    return out


def routing_of(kind: str, x: torch.Tensor) -> Routing:
    """Random gates; experts at random, all tokens to experts 2 and 4, or none to experts 0 and 5."""
    generator = torch.Generator().manual_seed(2)
    noise = torch.rand(len(x), EXPERTS, generator=generator)
    noise += torch.tensor({"random": [0.0] * 6, "one": [0, 0, 9, 0, 8, 0], "empty": [-9, 0, 0, 0, 0, -9]}[kind])
    gates = torch.rand(len(x), TOP_K, generator=generator).requires_grad_()
    return Routing(noise.topk(TOP_K).indices, gates, torch.zeros(len(x)), torch.zeros(EXPERTS))


def sorted_pairs(routing: Routing) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gates, the pairs of token and expert sorted by expert, and where each expert's end."""
    experts, order = routing.selected.flatten().sort(stable=True)
    return routing.gates, order, torch.bincount(experts, minlength=EXPERTS).cumsum(0).int()


@pytest.mark.parametrize("kind", ["random", "one", "empty"])
@pytest.mark.parametrize("tokens", [3, 50, 200])
def test_grouped_experts_are_the_experts_one_by_one(kind, tokens):
    experts, _, _ = build()
    x = inputs(tokens)
    routing = routing_of(kind, x)
    found, expected = experts.routed(x, routing), by_loop(experts, x, routing)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
    of = (x, routing.gates, experts.gate_up, experts.down)
    pairs = zip(*(torch.autograd.grad(value, of, upstream) for value in (found, expected)), strict=True)
    for gradient, wanted in pairs:
        assert (gradient - wanted).norm() <= 1e-5 * wanted.norm()
    if kind == "empty":
        assert torch.autograd.grad(experts.routed(x, routing).sum(), experts.down)[0][0].abs().max() == 0


@pytest.mark.parametrize("kind", ["random", "one", "empty"])
def test_grouped_products_give_the_same(kind):
    """What runs on CUDA, here by torch's grouped product for CPUs."""
    experts, _, _ = build()
    x = inputs().detach()
    gates, order, ends = (t.detach() for t in sorted_pairs(routing_of(kind, x)))
    arguments = (x, gates, experts.gate_up.detach(), experts.down.detach(), order, ends)
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
    out, hidden = expert_sum(*arguments)
    torch.testing.assert_close(operators.grouped_expert_sum(*arguments), (out, hidden), rtol=1e-5, atol=1e-5)
    found = operators.grouped_expert_sum_backward(grad, *arguments, hidden)
    for gradient, wanted in zip(found, expert_sum_backward(grad, *arguments, hidden), strict=True):
        assert (gradient - wanted).norm() <= 1e-5 * wanted.norm()


def test_an_upstream_gradient_without_memory_of_its_own():
    """torch's grouped product refuses the gradient of a sum, whose rows are all one number."""
    experts, router, bias = build()
    x = inputs()
    experts(x, router, bias)[0].sum().backward()
    expected = x.grad.clone()
    x.grad = None
    (experts(x, router, bias)[0] * torch.ones(len(x), DIM)).sum().backward()
    assert torch.equal(x.grad, expected)


def test_gates_and_counts():
    experts, router, bias = build(num_shared_experts=0)
    x, padding = inputs(), torch.arange(50) >= 40
    out, routing = experts(x, router, bias, padding)
    scores = (x @ router.T).sigmoid()
    assert torch.equal(routing.selected, (scores + bias).topk(TOP_K).indices)
    torch.testing.assert_close(routing.gates.sum(-1), torch.ones(50))
    torch.testing.assert_close(
        routing.gates[:, 0] / routing.gates[:, 1], (s := scores.gather(1, routing.selected))[:, 0] / s[:, 1]
    )
    torch.testing.assert_close(routing.z, (x @ router.T).exp().sum(-1).log().square())
    assert torch.equal(routing.load, torch.bincount(routing.selected[:40].flatten(), minlength=EXPERTS))
    torch.testing.assert_close(out, by_loop(experts, x, routing))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_splitting_a_batch_changes_nothing(dtype):
    experts, router, bias = build(dtype)
    x = inputs(100, dtype)
    whole, routing = experts(x, router, bias)
    parts = [experts(part, router, bias) for part in x.split((7, 93))]
    torch.testing.assert_close(
        torch.cat([out for out, _ in parts]), whole, rtol=1e-5, atol=2e-2 if dtype.itemsize == 2 else 1e-5
    )
    assert torch.equal(sum(r.load for _, r in parts), routing.load)
    assert (whole.dtype, routing.gates.dtype) == (torch.float32, torch.float32)
    # Of a routing that is given, not even the last bit: 7 tokens once had another order of addition than 100.
    first = Routing(*(t[:7] for t in routing))
    assert torch.equal(experts.routed(x[:7], first), experts.routed(x, routing)[:7])


def test_a_capacity_drops_the_lowest_gates_in_training_only():
    experts, router, bias = build(capacity_factor=0.75)
    x, capacity = inputs(), 12  # floor(0.75 x 50 x 2 / 6)
    out, routing = experts(x, router, bias)
    free = experts.eval()(x, router, bias)
    torch.testing.assert_close(free[1].gates.sum(-1), torch.ones(50))
    assert torch.equal(free[1].load, routing.load)
    for expert in range(EXPERTS):
        taken = (routing.selected == expert).nonzero().tolist()
        ranked = sorted(taken, key=lambda at: -free[1].gates[tuple(at)].item())
        kept, dropped = ranked[:capacity], ranked[capacity:]
        assert all(routing.gates[tuple(at)] > 0 for at in kept)
        assert all(routing.gates[tuple(at)] == 0 for at in dropped)
    sums = routing.gates.sum(-1)
    assert (sums.sub(1).abs() < 1e-6).logical_or(sums == 0).all()
    assert (routing.gates == 0).any()
    torch.testing.assert_close(out, experts.routed(x, routing) + experts.shared(x))


def test_padding_takes_no_capacity():
    selected = torch.zeros(4, 1, dtype=torch.int64)
    routing = Routing(selected, torch.tensor([[0.9], [0.8], [0.2], [0.1]]), torch.zeros(4), torch.zeros(1))
    padding = torch.tensor([True, True, False, False])
    assert gates_within_capacity(routing, 2).flatten().tolist() == [1, 1, 0, 0]
    assert gates_within_capacity(routing, 2, padding).flatten().tolist() == [0, 0, 1, 1]


def test_the_operators_keep_torchs_contract():
    experts, _, _ = build()
    x = inputs(20)
    gates, order, ends = sorted_pairs(routing_of("empty", x))
    arguments = (x, gates, experts.gate_up, experts.down, order, ends)
    torch.library.opcheck(expert_sum, arguments)
    detached = tuple(t.detach() for t in arguments)
    torch.library.opcheck(expert_sum_backward, (torch.randn(20, DIM), *detached, expert_sum(*detached)[1]))


def test_compiled_experts_are_the_same_in_one_graph():
    torch._dynamo.reset()
    experts, router, bias = build()
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True, dynamic=False)
    for seed in (4, 5):  # another routing, the same graph
        x = torch.randn(50, DIM, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        found, expected = compiled(x, router, bias)[0], experts(x, router, bias)[0]
        torch.testing.assert_close(found, expected)
        of = (x, router, experts.gate_up)
        for gradient, wanted in zip(
            *(torch.autograd.grad(out.square().sum(), of) for out in (found, expected)), strict=True
        ):
            torch.testing.assert_close(gradient, wanted)
        torch.compiler.set_stance("fail_on_recompile")
    torch.compiler.set_stance("default")
    torch._dynamo.reset()
