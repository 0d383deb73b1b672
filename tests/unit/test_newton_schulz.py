import numpy as np
import pytest
import torch

from titan_loom.optim import newton_schulz
from titan_loom.optim.newton_schulz import POLAR_EXPRESS, QUINTIC, in_batches, orthogonalize, step_coefficients

EPS = 1e-7


def singular_values(choice, num_steps, values):
    """What becomes of a 24 x 40 matrix's singular values."""
    generator = torch.Generator().manual_seed(0)
    left, _ = torch.linalg.qr(torch.randn(24, 24, generator=generator))
    right, _ = torch.linalg.qr(torch.randn(40, 24, generator=generator))
    matrix = left * values @ right.T
    (result,) = orthogonalize([matrix], step_coefficients(choice, num_steps), eps=EPS, dtype=torch.float32)
    return torch.linalg.svdvals(result)


def test_quintic_brings_singular_values_near_one():
    values = singular_values("quintic", 5, torch.linspace(0.05, 1, 24))
    assert values.min() > 0.65 and values.max() < 1.25


def test_polar_express_converges_from_a_thousandth_of_the_norm():
    values = torch.logspace(-2.9, 0, 24)
    assert (singular_values("polar_express", 9, values / values.norm()) - 1).abs().max() < 1e-4
    assert (singular_values("quintic", 9, values / values.norm()) - 1).abs().max() > 0.1


def best_quintic(low: float, high: float) -> np.ndarray:
    """(a, b, c) of the odd quintic that is nearest to 1 on [low, high], by Remez' exchange.

    Its error has the same size and alternating signs at the ends and at its two extrema between them.
    """
    points = np.linspace(low, high, 4)
    for _ in range(100):
        system = np.stack([points, points**3, points**5, [1, -1, 1, -1]], axis=1)
        a, b, c, _ = np.linalg.solve(system, np.ones(4))
        extrema = np.sqrt(np.roots([5 * c, 3 * b, a]).real)
        points = np.array([low, *sorted(extrema), high])
    return np.array([a, b, c])


def test_polar_express_is_the_composition_of_the_best_polynomials():
    """arXiv:2505.16932: each step is the best on where the one before has left singular values from 1e-3 to 1.

    Its interval is no wider than its cushion allows, and it is scaled so that both ends of the true one err alike.
    """
    cushion, stretch = 0.02407327424182761, np.array([1.01, 1.01**3, 1.01**5])
    low, high = 1e-3, 1.0
    for triple in POLAR_EXPRESS[:-1]:
        best = best_quintic(max(low, cushion * high), high)
        at_low, at_high = (best @ [end, end**3, end**5] for end in (low, high))
        scale = 2 / (at_low + at_high)
        np.testing.assert_allclose(triple * stretch, best * scale, atol=1e-9)
        low, high = scale * at_low, scale * at_high
    assert high - low < 1e-6  # where the limit for low = high = 1 is as good, which repeats
    np.testing.assert_allclose(best * scale, POLAR_EXPRESS[-1], atol=1e-5)


def test_the_last_triple_repeats():
    assert step_coefficients("quintic", 3) == (QUINTIC,) * 3
    assert step_coefficients([1.0, 2.0, 3.0], 2) == ((1.0, 2.0, 3.0),) * 2
    assert step_coefficients([(1, 2, 3), (4, 5, 6)], 3) == ((1, 2, 3), (4, 5, 6), (4, 5, 6))
    assert step_coefficients("polar_express", 9)[-2:] == ((1.875, -1.25, 0.375),) * 2


def test_an_unknown_polynomial_is_refused_with_the_choices():
    with pytest.raises(ValueError, match=r"'cubic'.*quintic or polar_express"):
        step_coefficients("cubic", 5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_batches_give_what_single_matrices_give(dtype, monkeypatch):
    monkeypatch.setattr(
        newton_schulz, "_BATCH_ELEMENTS", 200
    )  # two matrices of 8 x 12, so that shapes take several batches
    shapes = [(8, 12), (12, 8), (8, 12), (8, 12), (1, 9), (9, 1), (20, 20), (3, 8, 12), (0, 8, 12)]
    matrices = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(shapes)]
    originals = [matrix.clone() for matrix in matrices]

    def function(x):
        return newton_schulz.newton_schulz(x, step_coefficients("quintic", 5), EPS, dtype)

    for original, matrix, result in zip(originals, matrices, in_batches(function, matrices), strict=True):
        members = [function(member) for member in original] if original.ndim == 3 else function(original)
        expected = torch.stack(members) if isinstance(members, list) and members else members
        assert result.dtype == dtype and result.shape == original.shape
        if original.numel():
            torch.testing.assert_close(result, expected, rtol=0, atol=0.02 if dtype == torch.bfloat16 else 1e-5)
        assert torch.equal(original, matrix)


def test_products_in_fp32_are_as_good_as_bf16_ones(monkeypatch):
    """The substitute on CPUs without bf16 instructions rounds where they do, so its error is theirs."""
    matrix = torch.randn(96, 160, generator=torch.Generator().manual_seed(1))
    coefficients = step_coefficients("quintic", 5)
    (exact,) = orthogonalize([matrix], coefficients, eps=EPS, dtype=torch.float32)
    errors = {}
    for substitute in (True, False):
        monkeypatch.setattr(newton_schulz, "lacks_products", lambda dtype, answer=substitute: answer)
        (result,) = orthogonalize([matrix], coefficients, eps=EPS, dtype=torch.bfloat16)
        assert result.dtype == torch.bfloat16
        errors[substitute] = (result.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 0.8 < errors[True] / errors[False] < 1.25
    assert errors[True] < 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 40), (40, 1), (16, 24), (2, 16, 24)])
def test_zero_stays_zero_and_tiny_stays_finite(shape, dtype):
    zero, tiny = orthogonalize(
        [torch.zeros(shape), torch.full(shape, 1e-30)], step_coefficients("polar_express", 5), eps=EPS, dtype=dtype
    )
    assert torch.equal(zero, torch.zeros(shape, dtype=dtype))
    assert tiny.isfinite().all() and tiny.abs().max() < 1e-15
