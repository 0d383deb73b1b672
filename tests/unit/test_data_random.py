from titan_loom.tools.random import derive_seed, permutation


def test_seeds_and_orders_never_change_between_versions():
    assert derive_seed(0, "rows", 1) == 3241890434032886894
    assert permutation(6, 0, "rows", 1).tolist() == [4, 3, 1, 2, 0, 5]


def test_every_argument_matters():
    seeds = {derive_seed(*args) for args in [(0,), (1,), (0, "a"), (0, "b"), (0, "a", 1), (0, "a", "1"), (0, 1, "a")]}
    assert len(seeds) == 7
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_permutation_holds_every_index_once():
    assert sorted(permutation(1000, 3, "x")) == list(range(1000))
    assert permutation(0, 3, "x").tolist() == []
