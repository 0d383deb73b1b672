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
)
COMPARED = ("loss", "router_z_loss", "grad_norm", "segments", "batch_sha256")


def train(folder, steps: int, world_size: int = 1) -> list[dict]:
    return runs.train(folder, *OPTIONS, "--training.steps", str(steps), world_size=world_size, config=runs.LOOM)


def bias_steps(folder, step: int) -> torch.Tensor:
    """How often each expert's bias has gone up, less how often down."""
    reader = TensorReader(folder / "run" / "checkpoint" / f"step-{step}")
    saved = {"model.router_bias_steps": torch.zeros(2, 6, dtype=torch.int64)}
    dcp.load(saved, storage_reader=reader, no_dist=True)
    return saved["model.router_bias_steps"]


def test_a_stopped_run_goes_on_to_the_last_digit_and_two_processes_train_the_same(tmp_path):
    expected = train(tmp_path / "whole", 4)
    train(tmp_path / "stopped", 1)
    rows = train(tmp_path / "stopped", 4)
    assert [[row[key] for key in COMPARED] for row in rows] == [[row[key] for key in COMPARED] for row in expected]
    assert rows[-1]["validation/loss"] == expected[-1]["validation/loss"] == expected[-1]["validation/loop/3/loss"]

    two = train(tmp_path / "two", 4, world_size=2)
    for key in ("loss", "router_z_loss", "grad_norm"):
        assert [row[key] for row in two] == pytest.approx([row[key] for row in expected], rel=1e-4)
    # Once a step, whatever the number of segments, micro-batches and processes.
    assert bias_steps(tmp_path / "stopped", 1).unique().tolist() in ([-1, 1], [-1, 0, 1])
    assert torch.equal(bias_steps(tmp_path / "two", 4), bias_steps(tmp_path / "whole", 4))

    assert all(0 < row["router_z_loss"] < 0.1 for row in expected)
    assert "expert/distinct" in expected[1] and "expert/distinct" not in expected[2]
    assert all(len(expected[1][f"expert/loop/{loop}/layer/1/load"]) == 6 for loop in (1, 2, 3))
