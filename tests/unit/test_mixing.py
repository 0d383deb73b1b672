import random
from collections import Counter
from fractions import Fraction

import pytest

from titan_loom.data.mixing import Mixer, integer_weights


def mixer(shares=(0.75, 0.25), *, seq_len=4096, batch=128, total=None, steps=57_221, unit="sequence", stages=None):
    stages = stages or [(None, shares)]
    return Mixer(stages, seq_len=seq_len, global_batch_size=batch, total_tokens=total, steps=steps, unit=unit)


def simulate(shares, num_units, unit_tokens):
    """The rule as it is written down, in rationals, one unit after the other."""
    total = sum(Fraction(str(share)) for share in shares)
    fractions = [Fraction(str(share)) / total for share in shares]
    consumed, picks = [0] * len(shares), []
    for unit in range(num_units):
        handed_out = unit * unit_tokens
        credits = [share * (handed_out + unit_tokens) - used for share, used in zip(fractions, consumed, strict=True)]
        picks.append(credits.index(max(credits)))
        consumed[picks[-1]] += unit_tokens
    return picks


def row_counts(picks):
    return Counter(picks)


def test_shares_are_read_as_decimal_fractions():
    assert integer_weights([0.75, 0.25]) == (3, 1)
    assert integer_weights([0.1, 0.2, 0.7]) == (1, 2, 7)
    assert integer_weights([2, 4.0]) == (1, 2)
    assert integer_weights([1e-3, 1]) == (1, 1000)


@pytest.mark.parametrize(
    "shares", [(0.75, 0.25), (0.25, 0.75), (1,), (0.5, 0.5), (0.1, 0.2, 0.7), (0.31, 0.17, 0.29, 0.23), (0.003, 0.997)]
)
def test_picks_are_those_of_a_plain_simulation_and_repeat(shares):
    period = sum(integer_weights(shares))
    expected = simulate(shares, 2 * period + 5, 16)
    assert expected[:period] == expected[period : 2 * period]
    mix = mixer(shares, seq_len=16, batch=1)
    assert [mix.picks(step)[0][0] for step in range(len(expected))] == expected


def test_any_step_is_known_at_once():
    steps = list(range(200))
    stages = [(1_000_000, (0.31, 0.69)), (777_777, (1, 0)), (None, (0.7, 0.3))]
    in_order = [mixer(stages=stages, batch=6).picks(step) for step in steps]
    mix = mixer(stages=stages, batch=6)
    random.Random(0).shuffle(steps)
    assert all(mix.picks(step) == in_order[step] for step in steps)
    assert len(mixer().picks(10**15)) == len(mixer().picks(0))  # step by step, it would take years


def test_each_batch_of_128_has_96_and_32_rows():
    mix = mixer()
    for step in (0, 1, 2, 3, 1000, 57_219):
        assert row_counts(mix.picks(step)) == {(0, 4096): 96, (1, 4096): 32}


def test_whole_steps_alternate_as_published():
    mix = mixer(unit="step")
    assert "".join("SW"[mix.picks(step)[0][0]] for step in range(12)) == "SSWSSSWSSSWS"
    assert all(len(row_counts(mix.picks(step))) == 1 for step in range(12))


def test_the_recipe_ends_on_exactly_its_totals():
    mix = mixer(total=30_000_000_000)
    last = mix.picks(57_220)
    assert row_counts(last) == {(0, 4096): 44, (0, 256): 1, (1, 4096): 14, (1, 2816): 1, (-1, 0): 68}
    assert sum(tokens for _, tokens in last) == 240_640
    totals = [57_220 * 96 * 4096, 57_220 * 32 * 4096]
    for source, tokens in last:
        if source >= 0:
            totals[source] += tokens
    assert totals == [22_500_000_000, 7_500_000_000]


@pytest.mark.parametrize("unit", ["sequence", "step"])
def test_the_total_is_met_exactly_whatever_the_shares(unit):
    rng = random.Random(0)
    for _ in range(300):
        shares = [rng.randint(1, 20) for _ in range(rng.randint(1, 4))]
        seq_len, batch, total = rng.randint(1, 9), rng.randint(1, 6), rng.randint(1, 200)
        steps = -(-total // (seq_len * batch))
        mix = mixer(shares, seq_len=seq_len, batch=batch, total=total, steps=steps, unit=unit)
        tokens = Counter()
        for step in range(steps):
            picks = mix.picks(step)
            assert len(picks) == batch
            assert all(1 <= n <= seq_len if source >= 0 else n == 0 for source, n in picks)
            for source, n in picks:
                tokens[source] += n
        assert sum(tokens.values()) == total
        if unit == "sequence":
            # A last step with rows to spare meets each share to the token; any other is within a sequence or so of it.
            exact = [Fraction(share * total, sum(shares)) for share in shares]
            assert all(abs(tokens[source] - share) <= 2 * seq_len for source, share in enumerate(exact))


def test_shares_that_are_no_whole_tokens_round_by_largest_remainder():
    mix = mixer((1, 1, 1), seq_len=10, batch=8, total=11, steps=1)
    tokens = Counter()
    for source, n in mix.picks(0):
        tokens[source] += n
    assert [tokens[source] for source in range(3)] == [4, 4, 3]


@pytest.mark.parametrize("shares", [(0.75, 0.25), (0.9, 0.1)])
def test_every_lane_gets_every_source_in_its_share(shares):
    lanes, rows = 64, 2
    mix = mixer(shares)
    counts = [Counter() for _ in range(lanes)]
    num_steps = 1280
    for step in range(num_steps):
        positions = mix.positions(step)
        for position, (source, _) in enumerate(positions):
            counts[position // rows][source] += 1
    for lane in counts:
        assert lane[0] / (rows * num_steps) == pytest.approx(shares[0], abs=0.01)


def test_positions_rotate_the_picks_by_the_step():
    mix = mixer(batch=4)
    for step in (0, 1, 5):
        picks, positions = mix.picks(step), mix.positions(step)
        assert positions == [picks[(p + step) % 4] for p in range(4)]


def test_steps_after_the_last_are_full_because_workers_read_ahead():
    assert sum(tokens for _, tokens in mixer(total=30_000_000_000).picks(57_221)) == 128 * 4096
