from dataclasses import is_dataclass
from typing import Any, get_type_hints

import pytest

from titan_loom.config import Data, JobConfig, Source, Training
from titan_loom.config.bounds import bounds_of
from titan_loom.config.checks import check
from titan_loom.config.decoding import Text, override
from titan_loom.errors import UserError

GOOD = JobConfig(
    data=Data(lanes=4, sources={"a": Source(path="a"), "b": Source(path="b")}),
    training=Training(steps=100, local_batch_size=4, global_batch_size=16, seq_len=10),
)


def changed(**words: str) -> JobConfig:
    """`GOOD` with overrides; `__` stands for the dots of a key."""
    config = GOOD
    for key, word in words.items():
        table = Text(word)
        for name in reversed(key.split("__")):
            table = {name: table}
        config = override(config, table)
    return config


def sentence(config: JobConfig, world_size: int = 1) -> str:
    with pytest.raises(UserError) as error:
        check(config, world_size)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_good_configuration_passes(world_size):
    check(GOOD, world_size)


FREE = {"parallelism.data_parallel_shard_degree", "checkpoint.load_step", "debug.seed"}
"""Numbers without bounds: with rules of their own, or any."""


def numbers(cls: type, prefix: str = "") -> dict[str, Any]:
    """The annotation of every number in the sections, by its key."""
    found = {}
    for name, kind in get_type_hints(cls, include_extras=True).items():
        if is_dataclass(kind):
            found |= numbers(kind, f"{prefix}{name}.")
        elif get_type_hints(cls)[name] in (int, float, int | None, float | None):
            found[prefix + name] = kind
    return found


def test_every_number_has_bounds():
    assert {key for key, kind in numbers(JobConfig).items() if not bounds_of(kind)} == FREE


@pytest.mark.parametrize(
    ("key", "word", "allowed"),
    [
        ("training.seq_len", "0", "greater than 0"),
        ("training.total_tokens", "0", "greater than 0"),
        ("optimizer.lr", "-1", "0 or greater"),
        ("optimizer.lr", "inf", "finite"),
        ("optimizer.muon.lr", "nan", "0 or greater"),
        ("optimizer.controls.weight_decay", "-1", "0 or greater"),
        ("training.dataloader.num_workers", "-1", "0 or greater"),
        *[("lr_scheduler.decay_ratio", word, "from 0 to 1") for word in ("-0.1", "1.1", "nan")],
        *[("optimizer.beta1", word, "at least 0 and less than 1") for word in ("-0.1", "1", "nan")],
        *[("data.holdout_percent", word, "at least 0 and less than 100") for word in ("-0.1", "100", "nan")],
        ("guard.max_ratio", "1", "greater than 1"),
        ("model.loop_sampling_mean", "inf", "finite"),
        ("data.window", "1048577", "at most 1,048,576"),
        ("comm.init_timeout_seconds", "1000000001", "at most 1,000,000,000"),
        ("training.global_batch_size", "8000000000000", "at most 1,048,576"),  # its divisors were once looked for
    ],
)
def test_a_number_out_of_its_range_is_refused(key, word, allowed):
    found = sentence(changed(**{key.replace(".", "__"): word}))
    assert found.startswith(f"{key} is {word}")
    assert found.endswith(f"it must be {allowed}")


def test_an_infinite_norm_means_no_clipping():
    check(changed(training__max_norm="inf"), 1)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ({"training__steps": "none"}, ["training.steps", "training.total_tokens", "neither"]),
        (
            {"training__steps": "none", "training__total_tokens": "77", "data__packing": "first_fit"},
            ["training.total_tokens is 77", "data.packing = 'first_fit'", "training.steps"],
        ),
        ({"training__total_tokens": "7"}, ["training.steps", "training.total_tokens", "100 and 7"]),
        ({"data__sources__a__path": ""}, ["data.sources.a.path is not set"]),
        ({"data__sources__b__share": "0"}, ["data.sources.b.share is 0.0", "greater than 0"]),
        ({"data__sources__b__share": "inf"}, ["data.sources.b.share is inf", "finite"]),
        ({"data__sources__b__share": "nan"}, ["data.sources.b.share is nan"]),
        ({"data__sources__b__min_chars": "-1"}, ["data.sources.b.min_chars is -1", "0 or greater"]),
        (
            {"data__sources__b__min_chars": "5", "data__sources__b__max_chars": "4"},
            ["data.sources.b.max_chars is 4", "min_chars = 5 or more"],
        ),
        ({"data__sources__b__encode_batch_size": "0"}, ["data.sources.b.encode_batch_size is 0", "greater than 0"]),
        (
            {"data__sources__b__encode_batch_size": "100000000000"},
            ["b.encode_batch_size is 100000000000", "at most 65,536"],
        ),
        ({"training__steps": "1" + "0" * 25}, ["training.steps is 1000000", "at most 1,000,000,000 steps"]),
        (
            {"training__steps": "none", "training__total_tokens": "1" + "0" * 25},
            ["training.total_tokens is 1", "at most"],
        ),
        (
            {"lr_scheduler__warmup_steps": "3", "lr_scheduler__warmup_tokens": "5"},
            ["lr_scheduler.warmup_steps is 3", "lr_scheduler.warmup_tokens is 5", "only one"],
        ),
        ({"lr_scheduler__total_steps": "99"}, ["lr_scheduler.total_steps is 99", "at least the run's 100 steps"]),
        ({"optimizer__final_weight_decay": "0.1"}, ["optimizer.weight_decay_switch_tokens is not set"]),
        ({"optimizer__weight_decay_switch_tokens": "5"}, ["optimizer.final_weight_decay is not set"]),
        (
            {
                "optimizer__weight_decay": "0",
                "optimizer__final_weight_decay": "0.1",
                "optimizer__weight_decay_switch_tokens": "5",
            },
            ["optimizer.weight_decay is 0", "greater than 0"],
        ),
        (
            {"training__segment_loops": "3", "training__backprop_loops": "1"},
            ["training.segment_loops is 3", "training.backprop_loops is 1"],
        ),
        ({"training__z_loss_until_tokens": "5"}, ["training.z_loss_until_tokens is 5", "training.z_loss is 0"]),
        ({"parallelism__data_parallel_shard_degree": "0"}, ["parallelism.data_parallel_shard_degree is 0", "-1"]),
        (
            {"model__loop_sampling": "uniform"},
            ["model.loop_sampling_max is not set", "'uniform'", "at least loop_sampling_min = 1"],
        ),
        (
            {"model__loop_sampling": "uniform", "model__loop_sampling_min": "3", "model__loop_sampling_max": "2"},
            ["model.loop_sampling_max is 2", "loop_sampling_min = 3"],
        ),
        (
            {
                "model__loop_sampling": "poisson-lognormal",
                "model__loop_sampling_max": "2",
                "model__loop_sampling_mean": "1",
            },
            ["model.loop_sampling_mean is 1.0", "greater than 1"],
        ),
        (
            {"activation_checkpoint__mode": "selective", "activation_checkpoint__per": "loop"},
            ["activation_checkpoint.per is 'loop'", "'visit'"],
        ),
        ({"compile__enable": "true", "compile__components": ""}, ["compile.components is empty", '"model"']),
        (
            {"compile__mode": "reduce-overhead", "compile__backend": "eager"},
            ["compile.mode is 'reduce-overhead'", "compile.backend = 'eager'", "'default'"],
        ),
        ({"checkpoint__keep_latest_k": "1"}, ["checkpoint.keep_latest_k is 1", "0", "at least 2"]),
        (
            {"checkpoint__snapshot_interval": "750"},
            ["checkpoint.snapshot_interval is 750", "a multiple of checkpoint.interval = 500"],
        ),
        (
            {"checkpoint__keep_latest_snapshots": "2"},
            ["checkpoint.keep_latest_snapshots is 2", "checkpoint.snapshot_interval, which is 0"],
        ),
        ({"checkpoint__load_step": "-2"}, ["checkpoint.load_step is -2", "-1"]),
        (
            {"checkpoint__load_step": "5", "checkpoint__resume": "false"},
            ["checkpoint.load_step is 5", "checkpoint.resume = true"],
        ),
        (
            {"checkpoint__last_save_in_hf": "true", "checkpoint__enable": "false"},
            ["checkpoint.last_save_in_hf is true", "checkpoint.enable = true"],
        ),
        ({"hub__repo_id": "model"}, ["hub.repo_id is 'model'", "owner/name"]),
        (
            {"hub__repo_id": "owner/model", "checkpoint__enable": "false"},
            ["hub.repo_id is 'owner/model'", "checkpoint.enable = true"],
        ),
        ({"hub__resume": "true"}, ["hub.resume is true but hub.repo_id is not set"]),
        ({"hub__milestones": "50%, half"}, ["hub.milestones has 'half'", '"25%"']),
        ({"hub__flush_seconds": "-1"}, ["hub.flush_seconds is -1"]),
        ({"checkpoint__folder": "/tmp/x"}, ["checkpoint.folder is '/tmp/x'", "inside job.dump_folder"]),
        ({"checkpoint__folder": ""}, ["checkpoint.folder is ''"]),
        ({"metrics__save_tb_folder": "../x"}, ["metrics.save_tb_folder is '../x'"]),
        ({"metrics__save_tb_folder": "x\0"}, ["metrics.save_tb_folder is 'x\\x00'"]),
        *[
            ({key.replace(".", "__"): name}, [f"{key} is {name!r}", "another name"])
            for key in ("checkpoint.folder", "metrics.save_tb_folder")
            for name in ("metrics.jsonl", "./.lock", "config.toml", "logs/deeper", "outbox")
        ],
        ({"checkpoint__folder": "tb"}, ["checkpoint.folder is 'tb'", "metrics.save_tb_folder is 'tb'"]),
        ({"checkpoint__folder": "tb/x"}, ["checkpoint.folder is 'tb/x'", "neither may be in the other"]),
        ({"metrics__save_tb_folder": "checkpoint/tb"}, ["metrics.save_tb_folder is 'checkpoint/tb'"]),
    ],
)
def test_values_that_do_not_fit_together_are_refused(words, parts):
    found = sentence(changed(**words))
    assert all(part in found for part in parts), found


def test_a_run_needs_a_source():
    assert "data.sources is empty" in sentence(JobConfig(training=Training(steps=1), data=Data(lanes=1)))


def test_a_batch_that_does_not_divide_names_the_nearest_that_do():
    assert sentence(changed(training__global_batch_size="20"), world_size=2).endswith("4 x 2 = 8, such as 16 or 24")
    assert sentence(changed(training__global_batch_size="3")).endswith("4 x 1 = 4, such as 4")


@pytest.mark.parametrize(("lanes", "world_size", "allowed"), [("3", 1, "1, 2, 4, 8 or 16"), ("2", 4, "4, 8 or 16")])
def test_lanes_that_do_not_divide_name_those_that_do(lanes, world_size, allowed):
    found = sentence(changed(data__lanes=lanes), world_size)
    assert found.startswith(f"data.lanes is {lanes}; it must divide training.global_batch_size = 16")
    assert found.endswith(f": {allowed}")


def test_the_expected_number_of_processes_is_held():
    config = changed(parallelism__expected_world_size="2")
    check(config, 2)
    assert sentence(config, 1) == "parallelism.expected_world_size is 2; this run has 1 process"


@pytest.mark.parametrize(("replicate", "shard"), [("1", "-1"), ("1", "4"), ("2", "2"), ("4", "1"), ("4", "-1")])
def test_degrees_that_multiply_to_the_number_of_processes_pass(replicate, shard):
    check(
        changed(
            parallelism__data_parallel_replicate_degree=replicate,
            parallelism__data_parallel_shard_degree=shard,
        ),
        4,
    )


def test_degrees_that_do_not_multiply_to_the_number_of_processes_name_those_that_do():
    found = sentence(changed(parallelism__data_parallel_replicate_degree="3"), 4)
    assert found.startswith("parallelism.data_parallel_replicate_degree is 3") and found.endswith("= 4: 1, 2 or 4")
    found = sentence(changed(parallelism__data_parallel_shard_degree="3"), 4)
    assert found.startswith("parallelism.data_parallel_shard_degree is 3") and found.endswith("= 4: -1 or 4")


def test_a_schedule_may_be_longer_than_the_run_or_end_above_zero():
    check(changed(lr_scheduler__total_steps="200", lr_scheduler__warmup_steps="120"), 1)
    check(changed(lr_scheduler__total_steps="50", lr_scheduler__min_lr_factor="0.1"), 1)
