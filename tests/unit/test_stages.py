"""The curriculum: `[[data.stages]]`, from the scheduler to whole batches."""

import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import islice

import numpy as np
import pytest

from tests.unit.data_corpus import BATCH, SEQ_LEN, TOKENIZER, loader, read, write_corpus
from titan_loom.config import Data, JobConfig, Source, Stage, Training, load_config, to_toml
from titan_loom.config.checks import check
from titan_loom.data.loader import data_fingerprint
from titan_loom.data.mixing import Mixer
from titan_loom.errors import UserError


def mixer(stages, *, seq_len=10, batch=4, total=None, unit="sequence"):
    steps = 10**6 if total is None else -(-total // (seq_len * batch))
    return Mixer(stages, seq_len=seq_len, global_batch_size=batch, total_tokens=total, steps=steps, unit=unit)


def sources_of(mix, num_steps):
    return [source for step in range(num_steps) for source, _ in mix.picks(step)]


def test_a_stage_begins_with_the_first_sequence_at_or_after_its_boundary():
    for tokens, first in ((39, 4), (40, 4), (41, 5), (1, 1), (10, 1)):
        sources = sources_of(mixer([(tokens, [1, 0]), (None, [0, 1])]), 3)
        assert sources == [0] * first + [1] * (12 - first), tokens


def test_with_whole_steps_a_stage_begins_with_the_first_step_at_or_after_its_boundary():
    mix = mixer([(81, [1, 0]), (None, [0, 1])], unit="step")
    assert [mix.picks(step)[0][0] for step in range(5)] == [0, 0, 0, 1, 1]


def test_each_stage_is_mixed_as_a_run_of_its_own():
    stages = [(70, [0.5, 0.5]), (300, [0.9, 0.1]), (None, [0.2, 0.8])]
    sources = sources_of(mixer(stages), 30)
    expected = [
        source
        for (_, shares), length in zip(stages, (7, 30, 83), strict=True)
        for source in sources_of(mixer([(None, shares)], batch=1), length)
    ]
    assert sources == expected


def test_a_stage_shorter_than_a_sequence_may_be_passed_over():
    assert sources_of(mixer([(12, [1, 0, 0]), (3, [0, 1, 0]), (None, [0, 0, 1])]), 1) == [0, 0, 2, 2]


@pytest.mark.parametrize("batch", [1, 8, 16])
def test_two_thousand_sequences_are_75_and_25_percent_of_the_tokens_and_never_off_by_more_than_one(batch):
    seq_len = 4096
    mix = mixer([(None, [0.75, 0.25])], seq_len=seq_len, batch=batch, total=2000 * seq_len)
    tokens = [0, 0]
    for step in range(2000 // batch):
        for source, count in mix.picks(step):
            tokens[source] += count
            total = sum(tokens)
            assert abs(tokens[0] - Fraction(3, 4) * total) <= seq_len
            assert abs(tokens[1] - Fraction(1, 4) * total) <= seq_len
    assert tokens == [1500 * seq_len, 500 * seq_len]
    assert f"{100 * tokens[0] / sum(tokens):.3f} {100 * tokens[1] / sum(tokens):.3f}" == "75.000 25.000"


def test_every_stage_keeps_its_shares_to_a_sequence_at_any_time():
    shares = ([0.75, 0.25, 0.0], [0.2, 0.3, 0.5], [0.001, 0.0, 0.999])
    mix = mixer([(3000, shares[0]), (5000, shares[1]), (None, shares[2])])
    sources = sources_of(mix, 400)
    for begin, end, share in ((0, 300, shares[0]), (300, 800, shares[1]), (800, 1600, shares[2])):
        counts = [0, 0, 0]
        for number, source in enumerate(sources[begin:end], 1):
            counts[source] += 1
            assert all(abs(count - exact * number) <= 1 for count, exact in zip(counts, share, strict=True))


@pytest.mark.parametrize("unit", ["sequence", "step"])
def test_the_total_is_met_whatever_the_stages(unit):
    rng = random.Random(0)
    for _ in range(300):
        lengths = [rng.randint(1, 60) for _ in range(rng.randint(0, 3))] + [None]
        stages = [(length, [rng.randint(1, 9), rng.randint(0, 9), 1]) for length in lengths]
        seq_len, batch, total = rng.randint(1, 9), rng.randint(1, 6), rng.randint(1, 200)
        mix = mixer(stages, seq_len=seq_len, batch=batch, total=total, unit=unit)
        tokens = 0
        for step in range(-(-total // (seq_len * batch))):
            picks = mix.picks(step)
            assert len(picks) == batch
            assert all(1 <= n <= seq_len if source >= 0 else n == 0 for source, n in picks)
            tokens += sum(n for _, n in picks)
        assert tokens == total


def test_the_cut_last_step_meets_the_shares_of_the_last_stage_to_the_token():
    # 50 tokens of one source, then 1,003 at 2 : 1, which end within a step that has rows to spare.
    mix = mixer([(50, [1, 0]), (None, [2, 1])], total=1053, batch=16)
    tokens = Counter()
    for step in range(7):
        for source, count in mix.picks(step):
            tokens[source] += count
    assert [tokens[0] - 50, tokens[1]] == [669, 334]


def test_a_stage_that_begins_in_the_last_step_is_in_force_there():
    mix = mixer([(60, [1, 0]), (None, [0, 1])], total=75, batch=4)
    assert mix.picks(1) == [(0, 10), (0, 10), (1, 10), (1, 5)]


@pytest.fixture
def data(tmp_path) -> Data:
    write_corpus(tmp_path)
    sources = {
        "code": Source(path=str(tmp_path / "code"), format="repository"),
        "prose": Source(path=str(tmp_path / "prose")),
    }
    stages = [
        Stage(tokens=5 * BATCH * SEQ_LEN + 3, shares={"code": 0.5, "prose": 0.5}),
        Stage(tokens=3 * BATCH * SEQ_LEN, shares={"prose": 1.0}),
        Stage(shares={"prose": 0.25, "code": 0.75}),
    ]
    return Data(lanes=4, window=4, sources=sources, stages=stages)


def test_a_resume_at_just_before_and_just_after_a_change_is_exact(data):
    expected, _ = read(data, 14)
    counts = [np.bincount(batch.sources, minlength=2).tolist() for batch in islice(loader(data), 14)]
    # The boundary lies 3 tokens into the sixth step, so its first sequence is still the first stage's.
    assert counts == [[4, 4]] * 5 + [[1, 7]] + [[0, 8]] * 2 + [[5, 3]] + [[6, 2]] * 5
    for first in (4, 5, 6, 7, 8, 9, 10):
        _, states = read(data, first, degree=2)
        second, states = read(data, 1, start_step=first, lane_states=states)
        third, _ = read(data, 3, degree=4, start_step=first + 1, lane_states=states)
        assert second + third == expected[first : first + 4], first


def test_a_stage_with_the_sources_own_shares_is_no_change(data):
    plain = replace(
        data,
        stages=[],
        sources={"code": replace(data.sources["code"], share=3.0), "prose": data.sources["prose"]},
    )
    assert read(plain, 6)[0] == read(replace(plain, stages=[Stage(shares={"code": 0.75, "prose": 0.25})]), 6)[0]


def test_the_stages_belong_to_the_order_of_the_data_but_not_the_length_of_the_run(data):
    def fingerprint(stages):
        return data_fingerprint(replace(data, stages=stages), Training(), 0, TOKENIZER)["data.stages"]

    first, second, third = data.stages
    assert fingerprint([first, second, third]) == fingerprint([first, second, replace(third, tokens=9)])
    others = [[], [first, third], [replace(first, tokens=9), second, third], [first, second, first]]
    assert len({fingerprint(stages) for stages in [data.stages, *others]}) == 5


TOML = """
[training]
steps = 10
[data.sources.a]
path = "a"
[data.sources.b]
path = "b"
[[data.stages]]
tokens = 1_000
shares = { a = 1 }
[[data.stages]]
shares = { a = 0.5, b = 0.5 }
"""


def test_stages_are_read_and_written_again(tmp_path):
    (tmp_path / "run.toml").write_text(TOML)
    config = load_config(["--job.config_file", str(tmp_path / "run.toml")])
    assert config.data.stages == [Stage(tokens=1000, shares={"a": 1.0}), Stage(shares={"a": 0.5, "b": 0.5})]
    (tmp_path / "again.toml").write_text(to_toml(config))
    assert load_config(["--job.config_file", str(tmp_path / "again.toml")]).data == config.data
    check(config, 1)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (
            "tokens = 1_000",
            "token = 1",
            r"data\.stages\.0\.token is not a key; the nearest one is data\.stages\.0\.tokens",
        ),
        ("{ a = 1 }", '{ a = "x" }', r'data\.stages\.0\.shares\.a is "x" \(a string\); it must be a number'),
        ("{ a = 1 }", "{ c = 1 }", r"data\.stages\.0\.shares names 'c'; the sources are: a, b"),
        ("{ a = 1 }", "{ a = -1 }", r"data\.stages\.0\.shares\.a is -1\.0; it must be 0 or greater"),
        ("{ a = 1 }", "{ a = 0 }", r"data\.stages\.0\.shares gives no source a share"),
        ("tokens = 1_000", "", r"data\.stages\.0\.tokens is not set; only the last stage may leave it out"),
        ("tokens = 1_000", "tokens = 0", r"data\.stages\.0\.tokens is 0; it must be greater than 0"),
        (
            "shares = { a = 0.5",
            "tokens = 9\nshares = { a = 0.5",
            r"data\.stages have 1,009 tokens together; the run has 81,920",
        ),
        ("[training]", "[data]\nstages = 1\n[training]", r"not valid TOML"),
    ],
)
def test_a_mistake_in_a_stage_is_one_sentence(tmp_path, old, new, sentence):
    (tmp_path / "run.toml").write_text(TOML.replace(old, new))
    with pytest.raises(UserError, match=sentence):
        check(load_config(["--job.config_file", str(tmp_path / "run.toml")]), 1)


def test_the_command_line_cannot_spell_a_stage():
    with pytest.raises(UserError, match=r"data\.stages is \"x\" .* a list, each entry a table of tokens, shares"):
        load_config(["--data.stages", "x"])
    assert JobConfig().data.stages == []
