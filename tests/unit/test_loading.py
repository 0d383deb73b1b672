import subprocess
import sys
from dataclasses import dataclass, fields, is_dataclass, replace
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_loom.config import JobConfig, Source, load_config, to_toml
from titan_loom.config.decoding import decode, keys, override
from titan_loom.errors import UserError

FILE = """
[model]
flavor = "nanocoder"
[model.args]
num_loops = 3
[data.sources.stack_v3]
path = "a"
share = 3
[data.sources.prose]
path = "b"
[training]
steps = 5
max_norm = 2
[optimizer.muon]
lr = 0.5
"""


@pytest.fixture
def load(tmp_path):
    def load(*argv: str, toml: str = FILE) -> JobConfig:
        path = tmp_path / "run.toml"
        path.write_text(toml)
        return load_config(["--job.config_file", str(path), *argv])

    return load


def test_the_file_overrides_defaults_and_leaves_the_rest(load):
    config = load()
    assert config.training.steps == 5
    assert config.training.seq_len == JobConfig().training.seq_len
    assert config.optimizer.muon.lr == 0.5
    assert config.optimizer.muon.momentum == JobConfig().optimizer.muon.momentum


def test_the_command_line_overrides_the_file_and_the_last_word_wins(load):
    assert load("--training.steps", "7").training.steps == 7
    assert load("--training.steps=7", "--training.steps", "8").training.steps == 8


def test_an_integer_is_a_number_and_becomes_a_float(load):
    config = load()
    assert isinstance(config.training.max_norm, float)
    assert isinstance(config.data.sources["stack_v3"].share, float)


@pytest.mark.parametrize(
    ("word", "read"),
    [
        (["--training.total_tokens", "1_000"], lambda c: c.training.total_tokens == 1000),
        (["--checkpoint.load_step", "-1"], lambda c: c.checkpoint.load_step == -1),
        (["--optimizer.eps", "1e-9"], lambda c: c.optimizer.eps == 1e-9),
        (["--training.max-norm", "3"], lambda c: c.training.max_norm == 3),
        (["--lr-scheduler.warmup-steps=3"], lambda c: c.lr_scheduler.warmup_steps == 3),
        (["--compile.enable"], lambda c: c.compile.enable is True),
        (["--compile.enable", "--debug.deterministic"], lambda c: c.compile.enable and c.debug.deterministic),
        (["--checkpoint.resume", "FALSE"], lambda c: c.checkpoint.resume is False),
        (["--compile.components", "loss"], lambda c: c.compile.components == ["loss"]),
        (["--compile.components", "model, loss"], lambda c: c.compile.components == ["model", "loss"]),
        (["--compile.components="], lambda c: c.compile.components == []),
        (["--training.steps", "none"], lambda c: c.training.steps is None),
        (["--model.tokenizer_path", "none"], lambda c: c.model.tokenizer_path is None),
        (["--job.description", "a = b, c"], lambda c: c.job.description == "a = b, c"),
        (["--job.description=--x"], lambda c: c.job.description == "--x"),
        (["--optimizer.implementation", "for-loop"], lambda c: c.optimizer.implementation == "for-loop"),
    ],
)
def test_words_of_the_command_line_are_read_by_the_type_of_their_key(load, word, read):
    assert read(load(*word))


def test_model_arguments_keep_the_types_that_toml_or_the_command_line_gave_them(load):
    words = "--model.args.dim 8 --model.args.rope-theta 1e4 --model.args.schedule 0,1 --model.args.flag True"
    args = load(*words.split(), "--model.args.refresh", "gated", "--model.args.tail", "[1, 2]").model.args
    assert args == {
        "num_loops": 3,
        "dim": 8,
        "rope_theta": 1e4,
        "schedule": [0, 1],
        "flag": True,
        "refresh": "gated",
        "tail": [1, 2],
    }


def test_a_source_of_the_file_is_overridden_in_place(load):
    config = load("--data.sources.stack-v3.revision", "abc")
    assert list(config.data.sources) == ["stack_v3", "prose"]
    assert config.data.sources["stack_v3"] == Source(path="a", share=3.0, revision="abc")


def test_a_new_source_needs_a_path(load):
    config = load("--data.sources.extra.share", "2", "--data.sources.extra.path", "c")
    assert config.data.sources["extra"] == Source(path="c", share=2.0)
    with pytest.raises(UserError, match=r"data\.sources\.stack_v4 has no path .* are: stack_v3, prose"):
        load("--data.sources.stack_v4.revision", "abc")


@pytest.mark.parametrize(
    ("found", "nearest"),
    [
        ("training.stepz", "training.steps"),
        ("training.seqlen", "training.seq_len"),
        ("trainning.steps", "training.steps"),
        ("training.warmup_steps", "lr_scheduler.warmup_steps"),
        ("optimizer.max_norm", "training.max_norm"),
        ("optimizer.muon.mom", "optimizer.muon.momentum"),
        ("data.sources.prose.pth", "data.sources.prose.path"),
        ("steps", "training.steps"),
    ],
)
def test_an_unknown_key_names_the_nearest_one_wherever_it_was_written(load, found, nearest):
    sentence = rf"^{found} is not a key; the nearest one is {nearest}$"
    with pytest.raises(UserError, match=sentence):
        load(f"--{found}", "1")
    with pytest.raises(UserError, match=sentence):
        load(toml=f"{found} = 1")


@pytest.mark.parametrize(
    ("key", "toml", "word", "sentence"),
    [
        ("training.steps", '"abc"', "abc", 'is "abc" (a string); it must be an integer or none'),
        ("training.seq_len", '"1e9"', "1e9", 'is "1e9" (a string); it must be an integer'),
        ("training.max_norm", '"big"', "big", 'is "big" (a string); it must be a number'),
        ("compile.enable", '"maybe"', "maybe", 'is "maybe" (a string); it must be a boolean'),
        ("optimizer.name", '"SGD"', "SGD", 'is "SGD" (a string); it must be one of "Muon", "AdamW"'),
        ("optimizer.muon", '"x"', "x", 'is "x" (a string); it must be a table of keys'),
        ("data.sources", '"x"', "x", 'is "x" (a string); it must be a table of keys'),
    ],
)
def test_a_wrong_type_reads_the_same_in_the_file_and_on_the_command_line(load, key, toml, word, sentence):
    for mistake in (lambda: load(toml=f"{key} = {toml}"), lambda: load(f"--{key}", word, toml="")):
        with pytest.raises(UserError) as error:
            mistake()
        assert str(error.value) == f"{key} {sentence}"


@pytest.mark.parametrize(
    ("toml", "sentence"),
    [
        ("training.seq_len = 1e9", "training.seq_len is 1000000000.0 (a number); it must be an integer"),
        ("training.seq_len = true", "training.seq_len is true (a boolean); it must be an integer"),
        ("training.max_norm = true", "training.max_norm is true (a boolean); it must be a number"),
        ("compile.enable = 1", "compile.enable is 1 (an integer); it must be a boolean"),
        ("job.description = 1", "job.description is 1 (an integer); it must be a string"),
        ("training.steps = 2026-01-01", 'training.steps is "2026-01-01" (date); it must be an integer or none'),
        ("training.steps = {}", "training.steps is a table; it must be an integer or none"),
        (
            'compile.components = ["model", 1]',
            'compile.components is ["model", 1] (a list); it must be a list, each entry one of "model", "loss"',
        ),
    ],
)
def test_toml_types_are_not_bent(load, toml, sentence):
    with pytest.raises(UserError) as error:
        load(toml=toml)
    assert str(error.value) == sentence


def test_a_key_without_its_value_says_so(load):
    with pytest.raises(UserError, match=r"training\.steps is true \(a boolean\); it must be an integer"):
        load("--training.steps", "--compile.enable")


@pytest.mark.parametrize("word", ["steps=3", "-x", "--"])
def test_a_stray_word_is_refused(load, word):
    with pytest.raises(UserError, match=f"unexpected argument '{word}'"):
        load(word)


def test_a_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match=r"job\.config_file is '.*none\.toml', which cannot be read: No such file"):
        load_config(["--job.config_file", str(tmp_path / "none.toml")])
    with pytest.raises(UserError, match="which cannot be read: Is a directory"):
        load_config(["--job.config_file", str(tmp_path)])


def test_a_syntax_error_names_file_line_and_column(load):
    with pytest.raises(UserError, match=r"run\.toml', which is not valid TOML: .*line 2, column 7"):
        load(toml="[job]\nsteps 3\n")


def test_a_byte_order_mark_is_no_syntax_error(load):
    assert load(toml="\ufeff[job]\noverwrite = true\n").job.overwrite


def test_the_file_cannot_name_another_file(load):
    with pytest.raises(UserError, match=r"job\.config_file is 'x\.toml' in .*run\.toml"):
        load(toml='job.config_file = "x.toml"')


def test_the_dump_folder_defaults_to_the_name_of_the_file(load):
    assert load().job.dump_folder == "outputs/run"
    assert load("--job.dump_folder", "x/y").job.dump_folder == "x/y"


@dataclass(frozen=True, kw_only=True)
class Args:
    dim: int
    schedule: tuple[int, ...] | None = (1, 2)
    kind: Literal["a", "b"] = "a"

    def __post_init__(self):
        if self.dim < 0:
            raise UserError("args.dim is negative")


def test_any_frozen_dataclass_can_be_decoded_and_overridden():
    args = decode(Args, {"dim": 3, "schedule": [4]}, "args")
    assert args == Args(dim=3, schedule=(4,))
    assert override(args, {"schedule": "none"}, "args").schedule is None
    with pytest.raises(UserError, match=r"^args\.dim is not set; it must be an integer$"):
        decode(Args, {}, "args")
    with pytest.raises(UserError, match=r"^args\.dimm is not a key; the nearest one is args\.dim$"):
        override(args, {"dimm": 3}, "args")
    with pytest.raises(UserError, match=r'^args\.kind is "c" \(a string\); it must be one of "a", "b"$'):
        override(args, {"kind": "c"}, "args")
    with pytest.raises(UserError, match="negative"):
        override(args, {"dim": -1}, "args")


def instances(cls: type) -> st.SearchStrategy:
    hints = get_type_hints(cls)
    return st.builds(cls, **{field.name: values(hints[field.name]) for field in fields(cls)})


def values(kind: Any) -> st.SearchStrategy:
    toml = st.integers(-(2**63), 2**63 - 1) | st.booleans() | st.text() | st.floats(allow_nan=False)
    if is_dataclass(kind):
        return instances(kind)
    if kind is Any:
        return toml | st.lists(toml, max_size=2)
    if get_origin(kind) is dict:
        return st.dictionaries(st.text(min_size=1), values(get_args(kind)[1]), max_size=2)
    if get_origin(kind) is list:
        return st.lists(values(get_args(kind)[0]), max_size=2)
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if NoneType in get_args(kind):
        return st.none() | values(get_args(kind)[0])
    return st.from_type(kind).filter(lambda value: value == value)


@given(instances(JobConfig))
@settings(max_examples=50, deadline=None)
def test_a_configuration_that_we_wrote_loads_to_the_same_configuration(tmp_path_factory, config):
    path = tmp_path_factory.mktemp("config") / "config.toml"
    config = replace(config, job=replace(config.job, dump_folder="x", config_file=str(path)))
    path.write_text(to_toml(config), encoding="utf-8")
    assert load_config(["--job.config_file", str(path)]) == config


def test_none_needs_no_spelling_in_toml_because_every_optional_key_defaults_to_it():
    def check(instance: Any) -> None:
        for name, kind in get_type_hints(type(instance)).items():
            value = getattr(instance, name)
            if is_dataclass(value):
                check(value)
            elif NoneType in get_args(kind):
                assert value is None, name

    check(JobConfig())
    check(Source())


def test_help_lists_every_key_with_its_manual(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as leaving:
        load_config(["--training.steps", "3", "--help"])
    assert leaving.value.code == 0
    text = capsys.readouterr().out
    for key in keys(JobConfig):
        assert f"--{key}" in text, key
    assert "Steps between checkpoints." in text
    assert "any field of the flavor" in text


def test_help_shows_the_values_of_the_file(capsys, load):
    with pytest.raises(SystemExit):
        load("-h")
    assert "--data.sources.stack_v3.path" in capsys.readouterr().out


def test_reading_a_configuration_imports_no_torch():
    code = "import sys, titan_loom.config as c; c.load_config([]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_key_on_the_command_line_takes_the_place_of_the_one_it_excludes(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[training]\ntotal_tokens = 1000\n[lr_scheduler]\nwarmup_tokens = 10\n")
    argv = ["--job.config_file", str(file)]
    config = load_config([*argv, "--training.steps", "30", "--lr-scheduler.warmup-steps", "3"])
    assert (config.training.steps, config.training.total_tokens) == (30, None)
    assert (config.lr_scheduler.warmup_steps, config.lr_scheduler.warmup_tokens) == (3, None)
    both = load_config([*argv, "--training.steps", "30", "--training.total_tokens", "9"])
    assert (both.training.steps, both.training.total_tokens) == (30, 9)
    kept = load_config([*argv, "--training.steps", "none"])
    assert kept.training.total_tokens == 1000
