"""Whole runs whose number of loops changes from step to step, or whose sizes are odd: they report, stop and resume."""

import pytest

from tests import runs

ODD = ("--model.args.vocab_size", "8193", "--model.args.dim", "33", "--model.args.ffn_dim", "47")
SAMPLED = ("--model.loop_sampling", "uniform", "--model.loop_sampling_max", "4", "--training.backprop_loops", "2")
COMPARED = ("step", "loss", "grad_norm", "num_loops", "tokens_seen", "batch_sha256")


def compared(rows: list[dict]) -> list[dict]:
    return [{key: row[key] for key in COMPARED} for row in rows]


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        (2, ODD),
        (1, SAMPLED),
        (2, ("--parallelism.data_parallel_replicate_degree", "2", *SAMPLED)),
    ],
    ids=["odd sizes", "sampled loops", "sampled loops, DDP"],
)
def test_a_stopped_run_continues_to_the_last_digit(tmp_path, world_size, overrides):
    expected = runs.train(tmp_path / "whole", "--training.steps", "6", *overrides, world_size=world_size)
    runs.train(tmp_path / "stopped", "--training.steps", "3", *overrides, world_size=world_size)
    rows = runs.train(tmp_path / "stopped", "--training.steps", "6", *overrides, world_size=world_size)
    assert compared(rows) == compared(expected)
    loops = {row["num_loops"] for row in rows}
    assert loops == {2} if overrides is ODD else len(loops) > 1


def test_another_layout_draws_the_same_loops(tmp_path):
    one = runs.train(tmp_path / "1", "--training.steps", "4", *SAMPLED)
    two = runs.train(tmp_path / "2", "--training.steps", "4", *SAMPLED, world_size=2)
    assert [row["num_loops"] for row in two] == [row["num_loops"] for row in one]
    assert [row["loss"] for row in two] == pytest.approx([row["loss"] for row in one], rel=1e-4)
