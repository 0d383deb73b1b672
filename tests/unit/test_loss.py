import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from titan_loom.training.loss import IGNORED_LABEL, chunked_cross_entropy

TOKENS, DIM, VOCAB = 37, 16, 101


def problem(dtype=torch.float32, ignored=(0, 5, 6, 36)):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, DIM, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, DIM, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    labels[list(ignored)] = IGNORED_LABEL
    return hidden, weight, labels


def reference(hidden, weight, labels, z_coefficient):
    """The losses and gradients of the whole logits, in fp64."""
    hidden, weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    logits = hidden @ weight.T
    ce = F.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="none")
    z = logits.logsumexp(1).square() * (labels != IGNORED_LABEL)
    loss = (ce + z_coefficient * z).sum()
    return loss, ce, z, *torch.autograd.grad(loss, (hidden, weight))


def run(hidden, weight, labels, z_coefficient, chunk_tokens, scale=1.0):
    losses = chunked_cross_entropy(
        hidden, weight, labels, z_coefficient=torch.tensor(z_coefficient), chunk_tokens=chunk_tokens
    )
    return *losses, *torch.autograd.grad(losses.loss_sum * scale, (hidden, weight))


@pytest.mark.parametrize("chunk_tokens", [1, 8, 37, 1000])
@pytest.mark.parametrize("z_coefficient", [0.0, 0.01])
def test_losses_and_gradients_equal_those_of_the_whole_logits(chunk_tokens, z_coefficient):
    found = run(*problem(), z_coefficient, chunk_tokens)
    for value, expected in zip(found, reference(*problem(), z_coefficient), strict=True):
        torch.testing.assert_close(value.double(), expected, rtol=2e-5, atol=2e-5)


def test_gradients_are_those_of_finite_differences():
    hidden, weight, labels = problem()
    _, _, _, grad_hidden, grad_weight = run(hidden, weight, labels, 0.01, 8)
    direction = torch.Generator().manual_seed(1)
    along_hidden, along_weight = (torch.randn(t.shape, generator=direction).double() for t in (hidden, weight))

    def loss(step):
        moved = (hidden.detach() + step * along_hidden, weight.detach() + step * along_weight)
        return reference(*moved, labels, 0.01)[0].item()

    slope = (grad_hidden * along_hidden).sum() + (grad_weight * along_weight).sum()
    assert slope.item() == pytest.approx((loss(1e-5) - loss(-1e-5)) / 2e-5, rel=1e-4)


def test_backward_multiplies_by_the_upstream_gradient():
    whole, scaled = run(*problem(), 0.01, 8), run(*problem(), 0.01, 8, scale=0.125)
    for gradient, expected in zip(scaled[3:], whole[3:], strict=True):
        assert torch.equal(gradient, expected * 0.125)


def test_ignored_tokens_count_exactly_nothing():
    hidden, weight, labels = problem()
    _, ce, z, grad_hidden, grad_weight = run(hidden, weight, labels, 0.01, 8)
    ignored = labels == IGNORED_LABEL
    assert not ce[ignored].any()
    assert not z[ignored].any()
    assert not grad_hidden[ignored].any()
    kept = run(hidden.detach()[~ignored].requires_grad_(), weight, labels[~ignored], 0.01, 1000)
    torch.testing.assert_close(grad_weight, kept[4])


def test_nothing_supervised_gives_zeros():
    loss_sum, ce, z, grad_hidden, grad_weight = run(*problem(ignored=range(TOKENS)), 0.01, 8)
    for value in (loss_sum, ce, z, grad_hidden, grad_weight):
        assert not value.any()


def test_large_logits_do_not_overflow():
    hidden, weight, labels = problem()
    hidden = (hidden.detach() * 1000).requires_grad_()
    found = run(hidden, weight, labels, 1e-4, 8)
    for value, expected in zip(found, reference(hidden, weight, labels, 1e-4), strict=True):
        torch.testing.assert_close(value.double(), expected, rtol=1e-4, atol=1e-2)


def test_bf16_products_with_fp32_softmax_and_sums():
    hidden, weight, labels = problem(torch.bfloat16)
    loss_sum, ce, z, grad_hidden, grad_weight = run(hidden, weight, labels, 0.01, 8)
    assert (loss_sum.dtype, ce.dtype, z.dtype) == (torch.float32,) * 3
    assert (grad_hidden.dtype, grad_weight.dtype) == (torch.bfloat16,) * 2
    expected = reference(hidden, weight, labels, 0.01)
    torch.testing.assert_close(loss_sum.double(), expected[0], rtol=2e-3, atol=0)
    for gradient, wanted in zip((grad_hidden, grad_weight), expected[3:], strict=True):
        assert (gradient.double() - wanted).norm() < 0.02 * wanted.norm()


def test_the_heads_gradient_does_not_lose_chunks_in_bf16():
    """Summed in bf16, the gradient of a frequent token stops growing: here at 128 instead of 250."""
    hidden = torch.ones(500, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    losses = chunked_cross_entropy(
        hidden, weight, torch.zeros(500, dtype=torch.int64), z_coefficient=torch.tensor(0.0), chunk_tokens=1
    )
    losses.loss_sum.backward()
    assert weight.grad.flatten().tolist() == [-250.0, 250.0]


class LargestTensor(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.numel = 0
        self.calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.calls += function is torch.ops.aten.mm.default or function is torch.ops.aten.mm.out
        if isinstance(result, torch.Tensor):
            self.numel = max(self.numel, result.numel())
        return result


def test_the_full_logits_never_exist():
    with LargestTensor() as largest:
        run(*problem(), 0.01, chunk_tokens=8)
    assert largest.numel <= VOCAB * max(8, DIM)


def test_without_gradients_none_are_computed():
    hidden, weight, labels = problem()
    with torch.no_grad(), LargestTensor() as products:
        losses = chunked_cross_entropy(hidden, weight, labels, z_coefficient=torch.tensor(0.01), chunk_tokens=1000)
    assert products.calls == 1
    assert not losses.loss_sum.requires_grad
    torch.testing.assert_close(losses.loss_sum.double(), reference(hidden, weight, labels, 0.01)[0].detach())


def test_only_the_sum_carries_a_gradient():
    losses = chunked_cross_entropy(*problem(), z_coefficient=torch.tensor(0.01), chunk_tokens=8)
    assert losses.loss_sum.requires_grad
    assert not losses.ce.requires_grad
    assert not losses.z.requires_grad
