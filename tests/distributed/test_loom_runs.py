"""Whole runs of the mixture of experts, with everything that a step may do switched on."""

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests import runs
from titan_loom.training.dcp_reader import TensorReader

OPTIONS = (
    *("--data.packing", "first_fit", "--data.holdout_percent", "20", "--optimizer.name", "AdamW"),
    *("--training.segment_loops", "2", "--training.router_z_loss", "1e-3", "--guard.enable", "true"),
    *("--validation.enable", "true", "--validation.steps", "3", "--validation.local_batch_size", "2"),
    *("--diagnostics.enable", "true", "--diagnostics.interval", "2", "--lr_scheduler.total_steps", "8"),
    *("--checkpoint.interval", "1"),
)
COMPARED = ("loss", "router_z_loss", "grad_norm", "segments", "batch_sha256")
STEPS = 4


def train(folder, steps: int = STEPS, world_size: int = 1) -> list[dict]:
    return runs.train(folder, *OPTIONS, "--training.steps", str(steps), world_size=world_size, config=runs.LOOM)


def bias_steps(folder, step: int) -> torch.Tensor:
    """How often each expert's bias has gone up, less how often down: (layers, experts)."""
    reader = TensorReader(folder / "run" / "checkpoint" / f"step-{step}")
    saved = {"model.router_bias_steps": torch.zeros(2, 6, dtype=torch.int64)}
    dcp.load(saved, storage_reader=reader, no_dist=True)
    return saved["model.router_bias_steps"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, train(folder)


def test_a_stopped_run_goes_on_to_the_last_digit(tmp_path, whole):
    train(tmp_path, 1)
    rows, expected = train(tmp_path), whole[1]
    assert [[row[key] for key in COMPARED] for row in rows] == [[row[key] for key in COMPARED] for row in expected]
    assert rows[-1]["validation/loss"] == expected[-1]["validation/loss"] == expected[-1]["validation/loop/3/loss"]
    assert all(0 < row["router_z_loss"] < 0.1 for row in expected)
    assert "expert/distinct" in expected[1] and "expert/distinct" not in expected[2]
    assert all(len(expected[1][f"expert/loop/{loop}/layer/1/load"]) == 6 for loop in (1, 2, 3))


def test_four_processes_and_then_two_train_the_same(tmp_path, whole):
    train(tmp_path, 2, world_size=4)
    rows, (folder, expected) = train(tmp_path, world_size=2), whole
    assert [row["batch_sha256"] for row in rows] == [row["batch_sha256"] for row in expected]
    for key in ("loss", "router_z_loss", "grad_norm"):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in expected], rel=1e-4)
    assert rows[-1]["validation/loss"] == pytest.approx(expected[-1]["validation/loss"], rel=1e-4)
    # Once a step, whatever the number of segments, micro-batches and processes.
    before = torch.zeros(2, 6, dtype=torch.int64)
    for step in range(1, STEPS + 1):
        biases = bias_steps(folder, step)
        assert torch.equal(bias_steps(tmp_path, step), biases)
        assert (biases - before).abs().max() == 1
        before = biases
