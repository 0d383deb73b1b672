"""Newton-Schulz iterations: the orthogonal factor U V^T of a matrix U S V^T, by matrix products alone.

With A = X X^T, a step takes X to a X + (b A + c A^2) X, an odd polynomial of the singular values that drives them
towards 1. The quintic is Keller Jordan's (https://kellerjordan.github.io/posts/muon/), Polar Express is from Amsel,
Persson, Musco and Gower, arXiv:2505.16932.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

Triple = tuple[float, float, float]

QUINTIC: Triple = (3.4445, -4.7750, 2.0315)
"""Steepest at zero; five steps leave the singular values of most matrices between 0.7 and 1.2."""

_OPTIMAL: list[Triple] = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
]
# Every step is stretched by 1 %, as in the paper, so that rounding cannot push a singular value beyond the interval
# for which the step was optimised; the last one, which repeats, converges from anywhere near 1.
POLAR_EXPRESS: tuple[Triple, ...] = (
    *((a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in _OPTIMAL),
    (1.875, -1.25, 0.375),
)
"""The composition that is optimal step by step for singular values from 1e-3 to 1."""

# A batch of this many elements fills a GPU; a larger one only takes more memory.
_BATCH_ELEMENTS = 2**26


def step_coefficients(choice: str | Triple | Sequence[Triple], num_steps: int) -> tuple[Triple, ...]:
    """The triple (a, b, c) of each step.

    Args:
        choice: "quintic", "polar_express", one triple for all steps, or a triple for each step, the last repeating.

    Raises:
        ValueError: for another name.
    """
    if isinstance(choice, str):
        tables = {"quintic": [QUINTIC], "polar_express": POLAR_EXPRESS}
        if choice not in tables:
            raise ValueError(f"ns_coefficients is {choice!r}; it must be {' or '.join(tables)}, or triples of numbers")
        table = tables[choice]
    else:
        table = choice if isinstance(choice[0], Sequence) else [choice]
    return tuple(tuple(table[min(step, len(table) - 1)]) for step in range(num_steps))


def orthogonalize(
    matrices: list[Tensor], coefficients: Sequence[Triple], *, eps: float, dtype: torch.dtype
) -> list[Tensor]:
    """The orthogonal factor of each matrix, to the accuracy of the steps; zero stays zero.

    Args:
        matrices: (m, n) or stacks (e, m, n), of any floating dtype; they are not changed.
        coefficients: the triple of each step.
        eps: a matrix whose Frobenius norm is smaller is divided by `eps` instead, which leaves it small.
        dtype: every product is rounded to it, and the results have it.
    """
    function = partial(newton_schulz, coefficients=coefficients, eps=eps, dtype=dtype)
    # One product keeps a CPU busy and a batch only moves more memory: 24 matrices of 256 x 700 in bf16 took 110 ms as
    # one batch and 76 ms one by one. A GPU would idle between the small products of single matrices.
    if all(matrix.device.type == "cpu" for matrix in matrices):
        return [function(matrix) for matrix in matrices]
    return in_batches(function, matrices)


def newton_schulz(x: Tensor, coefficients: Sequence[Triple], eps: float, dtype: torch.dtype) -> Tensor:
    """`orthogonalize` for one matrix (m, n) or one stack (e, m, n)."""
    shape = x.shape
    x = _wide(x).to(dtype)  # the Gram matrix of the shorter side is the smaller one
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    product_dtype = torch.float32 if x.device.type == "cpu" and lacks_products(dtype) else dtype

    def rounded(product: Tensor) -> Tensor:
        return product.to(dtype).to(product_dtype)

    add_product = torch.addmm if x.ndim == 2 else torch.baddbmm
    x = x.to(product_dtype)
    for a, b, c in coefficients:
        gram = rounded(x @ x.mT)
        polynomial = rounded(add_product(gram, gram, gram, beta=b, alpha=c))
        x = rounded(add_product(x, polynomial, x, beta=a))
    x = x.to(dtype)
    return x if x.shape == shape else x.mT


def lacks_products(dtype: torch.dtype) -> bool:
    """Whether `dtype` is bf16 and this CPU has no instruction for its products.

    Newton-Schulz then multiplies in fp32 and rounds: four times faster than torch's bf16 products on such a CPU
    (256 x 700: 9 ms against 37), and the same numbers but for the order of the sums.
    """
    capabilities = torch.cpu.get_capabilities()
    native = any(capabilities.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16"))
    return dtype == torch.bfloat16 and not native


def in_batches(function: Callable[[Tensor], Tensor], matrices: list[Tensor]) -> list[Tensor]:
    """`function`, which takes stacks, of each matrix (m, n), those of one shape or its transpose together."""
    results = [function(matrix) if matrix.ndim == 3 else matrix for matrix in matrices]
    same_shape = defaultdict(list)
    for index, matrix in enumerate(matrices):
        if matrix.ndim == 2:
            same_shape[_wide(matrix).shape].append(index)
    for shape, indices in same_shape.items():
        size = max(1, _BATCH_ELEMENTS // shape.numel())
        for batch in (indices[start : start + size] for start in range(0, len(indices), size)):
            stack = function(torch.stack([_wide(matrices[index]) for index in batch]))
            for index, result in zip(batch, stack, strict=True):
                results[index] = result if result.shape == matrices[index].shape else result.mT
    return results


def _wide(x: Tensor) -> Tensor:
    return x.mT if x.shape[-2] > x.shape[-1] else x
