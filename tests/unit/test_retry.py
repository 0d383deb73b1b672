import pickle

import pytest

from titan_loom.config.job_config import Streaming
from titan_loom.data import retry
from titan_loom.data.retry import Access, Transient
from titan_loom.errors import ReadError


@pytest.fixture
def clock(monkeypatch):
    """Time that passes by sleeping only; what was slept."""
    slept: list[float] = []
    now = [0.0]

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(retry.time, "sleep", sleep)
    monkeypatch.setattr(retry.time, "monotonic", lambda: now[0])
    return slept


def failing(times: int, **details):
    """A function that fails so often before it gives "done"."""
    left = [times]

    def function():
        left[0] -= 1
        if left[0] >= 0:
            raise Transient("broken", **details)
        return "done"

    return function


def test_waits_double_with_jitter_up_to_a_minute(clock):
    assert Access("s", Streaming()).attempt("part", failing(9)) == "done"
    for wait, longest in zip(clock, [1, 2, 4, 8, 16, 32, 60, 60, 60], strict=True):
        assert longest / 2 <= wait <= longest
    assert len(set(clock)) == 9


def test_a_server_that_says_when_to_come_back_is_not_asked_before(clock):
    Access("s", Streaming()).attempt("part", failing(1, retry_after=120.0))
    assert 120 <= clock[0] <= 121


def test_the_budget_is_the_sources_and_an_hours(clock):
    access = Access("s", Streaming(failures_per_hour=10))
    for _ in range(10):
        access.attempt("part", failing(1))
    with pytest.raises(ReadError, match=r"data\.sources\.s: part cannot be read: broken; it was failure 11 within an"):
        access.attempt("part", failing(1))
    retry.time.sleep(3600)
    assert access.attempt("part", failing(1)) == "done"


def test_an_outage_of_half_an_hour_is_survived_and_one_without_end_is_not(clock):
    Access("s", Streaming()).attempt("part", lambda: None if retry.time.monotonic() > 1800 else failing(1)())
    with pytest.raises(ReadError, match="broken; it was failure 61"):
        Access("s", Streaming()).attempt("part", failing(1000))
    assert sum(clock) > 1800 + 1800


def test_errors_cross_processes_with_their_place():
    error = pickle.loads(pickle.dumps(ReadError("s", "a.parquet", "broken", 7)))
    assert str(error) == "data.sources.s: a.parquet, row 7 cannot be read: broken"
