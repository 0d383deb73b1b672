import pytest
import torch

from titan_loom.models.nanocoder.ngram import NgramMemory, ngram_rows

WORD = 2**64


def slow_row(window: list[int], num_rows: int) -> int:
    """The documented hash in Python's unbounded integers, reduced to 64 bits by hand."""
    h = len(window)
    for token in window:
        h = ((h ^ (token % WORD)) * 0x9E3779B97F4A7C15) % WORD
        h ^= h >> 32
    return h % 2**63 % num_rows


@pytest.mark.parametrize("order", [2, 4])
def test_rows_equal_the_hash_in_unbounded_integers(order):
    """The products exceed 64 bits at nearly every token, and half of the words have their sign bit set."""
    ids = torch.randint(0, 2**31, (3, 50), generator=torch.Generator().manual_seed(0))
    expected = [
        [slow_row(([-1, -1, -1, *row])[t + 4 - order : t + 4], 29_744) for t in range(len(row))] for row in ids.tolist()
    ]
    assert ngram_rows(ids, 29_744, order).tolist() == expected


def test_known_rows():
    """Trained tables are useless with any other hash: it may never change."""
    ids = torch.tensor([[0, 1, 2, 3, 8191, 8191]])
    assert ngram_rows(ids, 29_744, 2).tolist() == [[4452, 249, 28775, 6867, 26164, 11417]]
    assert ngram_rows(ids, 29_744, 4).tolist() == [[2277, 7472, 22838, 657, 27990, 25539]]


@pytest.mark.parametrize("order", [2, 4])
def test_decoding_with_history_gives_the_same_rows(order):
    ids = torch.randint(0, 8192, (2, 20), generator=torch.Generator().manual_seed(1))
    whole = ngram_rows(ids, 1000, order)
    history = torch.full((2, 3), -1)
    steps = []
    for t in range(ids.shape[1]):
        token = ids[:, t : t + 1]
        steps.append(ngram_rows(token, 1000, order, history))
        history = torch.cat((history[:, 1:], token), dim=1)
    assert torch.equal(torch.cat(steps, dim=1), whole)


def test_a_window_reads_the_current_and_the_previous_tokens_in_order():
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    changed = torch.tensor([[5, 99, 7, 8, 9, 10]])
    assert (ngram_rows(ids, 10**9, 2) != ngram_rows(changed, 10**9, 2)).tolist() == [[False, True, True] + [False] * 3]
    assert (ngram_rows(ids, 10**9, 4) != ngram_rows(changed, 10**9, 4)).tolist() == [[False] + [True] * 4 + [False]]
    swapped = torch.tensor([[6, 5]])
    assert ngram_rows(ids[:, :2], 10**9, 2)[0, 1] != ngram_rows(swapped, 10**9, 2)[0, 1]


@pytest.mark.parametrize("order", [2, 4])
def test_rows_are_spread_as_evenly_as_random_ones(order):
    """65,536 different windows of neighbouring ids on 4,096 rows: chi-square of 4,095 degrees of freedom, 6 sigma."""
    first, second = torch.meshgrid(torch.arange(256), torch.arange(256), indexing="ij")
    ids = torch.stack((torch.full_like(first, 7), first, torch.full_like(first, 9), second), dim=-1).flatten(0, 1)
    if order == 2:
        ids = torch.stack((first, second), dim=-1).flatten(0, 1)
    counts = ngram_rows(ids, 4096, order)[:, -1].bincount(minlength=4096).double()
    chi_square = ((counts - 16) ** 2 / 16).sum().item()
    assert abs(chi_square - 4095) < 6 * (2 * 4095) ** 0.5


def test_memory_has_exactly_four_parameters_and_projects_both_rows():
    memory = NgramMemory(dim=6, num_rows=11, columns=3, num_injections=2)
    shapes = {name: tuple(parameter.shape) for name, parameter in memory.named_parameters()}
    assert shapes == {
        "injection_scales": (2,),
        "bigram_table.weight": (11, 3),
        "fourgram_table.weight": (11, 3),
        "out_proj.weight": (6, 6),
    }
    assert not list(memory.buffers())
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    rows = torch.cat(
        (memory.bigram_table.weight[ngram_rows(ids, 11, 2)], memory.fourgram_table.weight[ngram_rows(ids, 11, 4)]), -1
    )
    torch.testing.assert_close(memory(ids), rows @ memory.out_proj.weight.T)
