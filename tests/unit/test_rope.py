import pytest
import torch

from titan_loom.models.layers.rope import apply_rope, rope_tables

THETA = 100_000.0
HEAD_DIM = 8


def heads(seq_len: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, seq_len, 3, HEAD_DIM, generator=torch.Generator().manual_seed(seed))


def tables(seq_len: int) -> torch.Tensor:
    return rope_tables(seq_len, HEAD_DIM, THETA, torch.device("cpu"))


@pytest.mark.parametrize("interleaved", [True, False])
def test_pairs_turn_by_position_times_frequency(interleaved):
    x = heads(seq_len=50)
    turned = apply_rope(x, tables(50), interleaved)
    for i in range(HEAD_DIM // 2):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + HEAD_DIM // 2)
        angle = torch.arange(50, dtype=torch.float64)[:, None] * THETA ** (-2 * i / HEAD_DIM)
        expected = torch.complex(x[..., a].double(), x[..., b].double()) * torch.polar(torch.ones_like(angle), angle)
        torch.testing.assert_close(turned[..., a].double(), expected.real, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(turned[..., b].double(), expected.imag, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("interleaved", [True, False])
def test_scores_depend_on_the_distance_only(interleaved):
    q, k = (heads(seq_len=1, seed=seed).expand(-1, 40, -1, -1) for seed in (1, 2))
    q, k = apply_rope(q, tables(40), interleaved), apply_rope(k, tables(40), interleaved)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
    for distance in (0, 1, 17):
        diagonal = scores.diagonal(-distance, dim1=-2, dim2=-1)
        torch.testing.assert_close(diagonal, diagonal[..., :1].expand_as(diagonal), atol=1e-4, rtol=1e-4)
    assert (scores.diagonal(-1, dim1=-2, dim2=-1)[..., 0] - scores.diagonal(dim1=-2, dim2=-1)[..., 0]).abs().max() > 0.1


def test_the_two_pairings_differ_by_a_permutation_and_by_no_less():
    x = heads(seq_len=10)
    permutation = torch.arange(HEAD_DIM).view(-1, 2).T.flatten()  # 0 2 4 6 1 3 5 7
    permuted = apply_rope(x[..., permutation], tables(10), interleaved=False)
    torch.testing.assert_close(permuted, apply_rope(x, tables(10), interleaved=True)[..., permutation])
    assert not torch.allclose(apply_rope(x, tables(10), True), apply_rope(x, tables(10), False), atol=0.1)


def test_low_precision_heads_are_turned_in_fp32():
    x = heads(seq_len=30).bfloat16()
    turned = apply_rope(x, tables(30), interleaved=True)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, apply_rope(x.float(), tables(30), interleaved=True).bfloat16())
