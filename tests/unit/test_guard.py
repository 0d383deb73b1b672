from dataclasses import replace

import pytest

from titan_loom.config.job_config import Guard
from titan_loom.training.guard import find_spike

ON = Guard(enable=True)
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("loss", "grad_norm", "baseline", "is_warming_up", "is_spike"),
    [
        # at an average of 2.0: delta 0.18 (0.06 of it is less), ratio 1.09 = 0.18 above
        (2.17, 1.0, 2.0, False, False),
        (2.185, 1.0, 2.0, False, True),
        # at 4.0: 0.06 of it is 0.24, the ratio is at 0.36
        (4.23, 1.0, 4.0, False, False),
        (4.25, 1.0, 4.0, False, True),
        (4.25, 1.0, 4.0, True, False),
        (4.37, 1.0, 4.0, True, True),
        # at 1.0 the ratio comes first
        (1.08, 1.0, 1.0, False, False),
        (1.10, 1.0, 1.0, False, True),
        # falls and first losses are no spikes
        (0.5, 1.0, 4.0, False, False),
        (400.0, 1.0, None, False, False),
        # what is not finite is one always
        (NAN, 1.0, None, True, True),
        (INF, 1.0, 2.0, False, True),
        (2.0, NAN, 2.0, False, True),
        (2.0, INF, None, True, True),
    ],
)
def test_what_is_a_spike(loss, grad_norm, baseline, is_warming_up, is_spike):
    found = find_spike(loss, grad_norm, baseline, ON, is_warming_up=is_warming_up)
    assert (found is not None) == is_spike


def test_a_large_rise_is_a_spike_whatever_its_ratio():
    wide = replace(ON, max_ratio=9.0, relative_delta=9.0)
    assert find_spike(31.4, 1.0, 30.0, wide, is_warming_up=True) is None
    assert (
        find_spike(31.5, 1.0, 30.0, wide, is_warming_up=True) == "the loss rose to 31.5000 from an average of 30.0000"
    )


def test_switched_off_it_only_looks_for_what_is_not_finite():
    assert find_spike(1e9, 1e9, 1.0, Guard(), is_warming_up=False) is None
    assert find_spike(NAN, 1.0, 1.0, Guard(), is_warming_up=False) == "the loss is not finite"
    assert find_spike(1.0, NAN, 1.0, Guard(), is_warming_up=False) == "a gradient is not finite"
