import torch
from hypothesis import given
from hypothesis import strategies as st

from titan_loom.optim.owner_exchange import assign_owners, shard_rows


def cost(shape):
    return min(shape) ** 2 * max(shape)


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), max_size=40), st.integers(1, 9))
def test_no_owner_has_more_than_the_mean_and_one_matrix(shapes, num_ranks):
    owners = assign_owners(shapes, num_ranks)
    loads = [sum(cost(s) for s, o in zip(shapes, owners, strict=True) if o == rank) for rank in range(num_ranks)]
    assert sum(loads) == sum(map(cost, shapes))
    assert max(loads) <= sum(loads) / num_ranks + max(map(cost, shapes), default=0)


def test_equal_matrices_are_dealt_evenly():
    owners = assign_owners([(256, 700)] * 24 + [(256, 256)] * 16, 4)
    assert sorted(owners[:24]) == sorted(list(range(4)) * 6) and sorted(owners[24:]) == sorted(list(range(4)) * 4)


@given(st.integers(1, 1000), st.integers(1, 40))
def test_rows_of_a_shard_are_those_of_torch_chunk(num_rows, num_ranks):
    chunks = [len(chunk) for chunk in torch.empty(num_rows).chunk(num_ranks)]
    assert list(shard_rows(num_rows, num_ranks)) == chunks + [0] * (num_ranks - len(chunks))
