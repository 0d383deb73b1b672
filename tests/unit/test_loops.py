from dataclasses import replace
from statistics import mean

import pytest

from titan_loom.config import Model, Training
from titan_loom.errors import UserError
from titan_loom.models.nanocoder import FLAVORS
from titan_loom.training.loops import LoopPlan

NANOCODER = FLAVORS["nanocoder"]
LIST = replace(NANOCODER, schedule=(0, 1, 1), ngram_visits=(0,))


def plan(args=NANOCODER, seed=0, training=None, **model) -> LoopPlan:
    return LoopPlan(Model(**model), training or Training(), args, seed)


def draws(loops: LoopPlan, count: int = 20_000) -> list[int]:
    return [loops.num_loops(step) for step in range(count)]


def test_a_fixed_number_is_the_models_own():
    assert draws(plan(), 3) == [None] * 3


def test_uniform_draws_every_number_equally_often():
    numbers = draws(plan(loop_sampling="uniform", loop_sampling_min=2, loop_sampling_max=5))
    assert set(numbers) == {2, 3, 4, 5}
    assert all(numbers.count(n) / len(numbers) == pytest.approx(0.25, abs=0.02) for n in range(2, 6))


def test_poisson_lognormal_has_its_mean_and_its_heavy_tail():
    numbers = draws(plan(loop_sampling="poisson-lognormal", loop_sampling_mean=9.0, loop_sampling_max=1000))
    assert min(numbers) == 1
    assert mean(numbers) == pytest.approx(9, rel=0.02)
    # Var = E[r] + E[r]^2 (exp(sigma^2) - 1), r the rate with mean 8; a Poisson alone has 8.
    assert mean((n - 9) ** 2 for n in numbers) == pytest.approx(8 + 64 * 0.284, rel=0.1)


def test_draws_are_cut_to_the_range():
    numbers = draws(plan(loop_sampling="poisson-lognormal", loop_sampling_min=2, loop_sampling_max=4), 500)
    assert set(numbers) == {2, 3, 4}


def test_draws_depend_on_seed_and_step_only():
    sampled = {"loop_sampling": "uniform", "loop_sampling_max": 8}
    first, again, other = (draws(plan(seed=seed, **sampled), 50) for seed in (0, 0, 1))
    assert first == again != other
    assert plan(**sampled).num_loops(40) == first[40]


@pytest.mark.parametrize("args", [LIST, replace(NANOCODER, num_loops=1)])
def test_only_a_loop_can_be_sampled(args):
    with pytest.raises(UserError, match=r"model\.loop_sampling is 'uniform'; it must be 'fixed'"):
        plan(args, loop_sampling="uniform", loop_sampling_max=4)


def test_a_list_has_no_loops_to_cut():
    with pytest.raises(UserError, match=r"training\.backprop_loops is 1; it must be unset with model\.args\.schedule"):
        plan(LIST, training=Training(backprop_loops=1))


def test_segments_cover_the_loops_of_a_step():
    assert plan().segments(None) == [None]
    segmented = plan(training=Training(segment_loops=3))
    assert segmented.segments(None) == [(0, 2)]
    assert segmented.segments(7) == [(0, 3), (3, 6), (6, 7)]
    with pytest.raises(UserError, match=r"training\.segment_loops is 3; it must be 0 with model\.args\.schedule"):
        plan(LIST, training=Training(segment_loops=3))


def test_a_prelude_without_any_gradient_has_to_be_allowed():
    with pytest.raises(UserError, match=r"training\.backprop_loops is 1, .* at least 2, .*allow_frozen_prelude true"):
        plan(training=Training(backprop_loops=1))
    plan(training=Training(backprop_loops=1, allow_frozen_prelude=True))
    plan(training=Training(backprop_loops=2))
    plan(replace(NANOCODER, prelude=0), training=Training(backprop_loops=1))
    # Sometimes few enough loops run that the prelude learns.
    plan(training=Training(backprop_loops=1), loop_sampling="uniform", loop_sampling_max=4)
