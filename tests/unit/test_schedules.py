import math

import pytest

from titan_loom.config import job_config
from titan_loom.optim.schedules import Schedule, TokenSwitch

TRAINING = job_config.Training(global_batch_size=128, seq_len=4096, total_tokens=30_000_000_000)
WARMUP, DECAY_START, STEPS = 1_145, 48_638, 57_221


def published(**changes) -> Schedule:
    return Schedule(job_config.LRScheduler(warmup_tokens=600_000_000, **changes), TRAINING)


def small(**changes) -> Schedule:
    return Schedule(job_config.LRScheduler(**changes), job_config.Training(steps=20))


def test_published_schedule_in_steps():
    schedule = published()
    assert (schedule.warmup_steps, schedule.decay_start, schedule.total_steps) == (WARMUP, DECAY_START, STEPS)


def test_warm_up_starts_above_zero_and_ends_at_the_peak():
    schedule = published()
    assert schedule.lr_factor(0) == 1 / WARMUP
    assert schedule.lr_factor(WARMUP - 2) == (WARMUP - 1) / WARMUP
    assert {schedule.lr_factor(step) for step in (WARMUP - 1, WARMUP, 30_000, DECAY_START - 1, DECAY_START)} == {1.0}


def test_cosine_decay_follows_the_equation_and_the_last_step_still_learns():
    schedule = published()
    for step in (DECAY_START, 50_000, 55_000, STEPS - 1):
        progress = (step - DECAY_START) / (STEPS - DECAY_START)
        assert schedule.lr_factor(step) == pytest.approx(0.5 * (1 + math.cos(math.pi * progress)), rel=1e-12)
    assert 0 < schedule.lr_factor(STEPS - 1) < 1e-7
    assert schedule.lr_factor(STEPS) == schedule.lr_factor(STEPS + 1000) == 0.0


def test_decay_end_at_the_last_step_reaches_the_floor_there():
    schedule = published(decay_end="last_step", min_lr_factor=0.1, decay_type="linear")
    assert schedule.lr_factor(DECAY_START - 1) == 1.0
    assert schedule.lr_factor(DECAY_START) == pytest.approx(1 - 0.9 / (STEPS - DECAY_START))
    assert schedule.lr_factor(STEPS - 1) == pytest.approx(0.1)
    assert schedule.lr_factor(STEPS + 1) == pytest.approx(0.1)


@pytest.mark.parametrize(("decay_type", "halfway"), [("linear", 0.5), ("sqrt", 1 - math.sqrt(0.5)), ("cosine", 0.5)])
def test_decay_types_go_from_the_peak_to_the_floor(decay_type, halfway):
    schedule = small(decay_ratio=0.5, decay_type=decay_type, min_lr_factor=0.2)
    assert schedule.lr_factor(10) == 1.0
    assert schedule.lr_factor(15) == pytest.approx(0.2 + 0.8 * halfway)
    assert schedule.lr_factor(20) == pytest.approx(0.2)
    factors = [schedule.lr_factor(step) for step in range(10, 21)]
    assert factors == sorted(factors, reverse=True)


def test_without_warm_up_and_decay_the_rate_is_constant():
    schedule = small(decay_ratio=0.0, min_lr_factor=0.1)
    assert {schedule.lr_factor(step) for step in range(20)} == {1.0}
    assert schedule.lr_factor(20) == 0.1


def test_a_decay_ratio_that_binary_fractions_miss_gives_whole_steps():
    """100 * 0.29 is 28.999999999999996: cutting it off lost a step of decay."""
    schedule = Schedule(job_config.LRScheduler(decay_ratio=0.29), job_config.Training(steps=100))
    assert schedule.decay_start == 71


def test_the_length_of_the_schedule_may_differ_from_that_of_the_run():
    long = Schedule(job_config.LRScheduler(total_steps=100, warmup_steps=5), job_config.Training(steps=20))
    longer_run = Schedule(job_config.LRScheduler(total_steps=100, warmup_steps=5), job_config.Training(steps=40))
    assert [long.lr_factor(step) for step in range(20)] == [longer_run.lr_factor(step) for step in range(20)]
    assert long.lr_factor(19) == 1.0


def test_a_trial_of_a_few_steps_cuts_the_warm_up_to_the_run_and_the_decay_to_what_is_left():
    schedule = Schedule(job_config.LRScheduler(warmup_steps=1_145), job_config.Training(steps=20))
    assert [schedule.lr_factor(step) for step in (0, 9, 19)] == [1 / 20, 10 / 20, 1.0]
    schedule = Schedule(job_config.LRScheduler(warmup_steps=18), job_config.Training(steps=20))
    assert [schedule.lr_factor(step) for step in (17, 18, 19)] == [1.0, 1.0, 0.5]


def test_a_value_switches_before_the_first_step_that_starts_with_enough_tokens():
    weight_decay = TokenSwitch(0.1, 0.01, 12_000_000_000)
    values = [weight_decay((number - 1) * TRAINING.tokens_per_step) for number in (1, 22_889, 22_890, STEPS)]
    assert values == [0.1, 0.1, 0.01, 0.01]
    assert TokenSwitch(1e-4, 0.0, 100)(99) == 1e-4
    assert TokenSwitch(1e-4, 0.0, 100)(100) == 0.0


def test_a_value_without_a_switch_stays():
    assert TokenSwitch(0.1, None, None)(10**15) == 0.1


def test_the_log_line_names_every_part():
    line = published().describe()
    assert line == "1,145 steps of warm-up, 47,493 flat, 8,583 of cosine decay to 0 of the peak (after last step)"
