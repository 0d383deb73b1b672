"""What follows a spike: the same on all ranks, and the same again when the run is stopped in the middle of it."""

import json
import math

import torch

from tests import processes, runs
from titan_loom.errors import RunError

GUARDED = ("--guard.enable", "true", "--training.segment_loops", "1", "--checkpoint.interval", "2")
SPIKES = {(4, 0): math.nan, (5, 1): 10.0}
"""What losses and gradients are multiplied by, at a step and the first loop of a segment."""
COMPARED = ("step", "loss", "grad_norm", "segments", "batch_sha256", "tokens_seen")


def _train(argv: list[str], spikes: dict[tuple[int, int], float]) -> tuple[str, list]:
    """Train, with the losses and gradients of some (step, segment) times a factor; how it ended, and the weights and
    buffers that it ended with."""
    from tests.layouts import whole
    from titan_loom.config.loading import load_config
    from titan_loom.trainer import Trainer

    class Spiked(Trainer):
        def forward_backward(self, micro_batches, num_tokens, num_loops, segment, observer):
            sums, load = super().forward_backward(micro_batches, num_tokens, num_loops, segment, observer)
            factor = spikes.get((self.step, segment.start))
            if factor is not None:
                sums *= factor
                for parameter in self.model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(factor)
            return sums, load

    trainer, ended = Spiked(load_config(argv)), ""
    try:
        trainer.train()
    except RunError as error:
        ended = str(error)
    weights = [whole(parameter).double().sum().item() for parameter in trainer.model.parameters()]
    weights += [buffer.tolist() for buffer in trainer.model.buffers()]
    trainer.close()
    return ended, weights


def train(folder, spikes, *overrides, world_size=1, config=runs.SMALL):
    folder.mkdir(exist_ok=True)
    (folder / "small.toml").write_text(config)
    argv = ["--job.config_file", str(folder / "small.toml"), "--job.dump_folder", str(folder / "run")]
    first, *others = processes.run(_train, world_size, [*argv, *GUARDED, *overrides], spikes)
    assert all(other == first for other in others)  # weights to the last digit, too
    return first


def compared(folder) -> list[dict]:
    return [{key: row[key] for key in COMPARED} for row in runs.metrics(folder)]


def guard_state(folder, step: int) -> dict:
    return json.loads((folder / "run" / "checkpoint" / f"step-{step}" / "train_state.json").read_text())["guard"]


def test_a_spike_costs_a_step_and_its_update(tmp_path):
    ended, values = train(tmp_path, SPIKES, "--training.steps", "6", config=runs.LOOM)
    assert ended == ""
    rows = runs.metrics(tmp_path)
    assert [len(row["segments"]) for row in rows] == [3, 3, 3, 1, 2, 3]
    assert [row.get("spike", "")[:17] for row in rows] == ["", "", "", "the loss is not f", "the loss rose to ", ""]
    assert rows[3]["loss"] is None
    # What the experts were sent in a step that was given up does not move their biases.
    assert torch.tensor(values[-1]).abs().max() == 4
    state = guard_state(tmp_path, 6)
    assert state["passed_over"] == [] and state["skipped_in_a_row"] == 0


def test_every_rank_rolls_back_and_a_stop_in_between_changes_nothing(tmp_path):
    steps, layout = ("--guard.action", "rollback", "--training.steps"), {"world_size": 2, "config": runs.LOOM}
    whole = train(tmp_path / "whole", SPIKES, *steps, "6", **layout)
    assert guard_state(tmp_path / "whole", 6)["passed_over"] == [[3, 4], [5, 5]]
    # Step 3 is saved between the spike and the last regular checkpoint: going back must not end there.
    train(tmp_path / "stopped", SPIKES, *steps, "3", **layout)
    again = train(tmp_path / "stopped", SPIKES, *steps, "6", **layout)
    assert again == whole
    assert compared(tmp_path / "stopped") == compared(tmp_path / "whole")


def test_going_back_restores_weights_and_averages(tmp_path):
    steps = ("--training.steps", "3", "--guard.action", "rollback")
    _, back = train(tmp_path / "back", {(3, 1): math.nan}, *steps)
    _, there = train(tmp_path / "there", {}, *steps[2:], "--training.steps", "2")
    assert back == there
    assert guard_state(tmp_path / "back", 3)["baselines"] == guard_state(tmp_path / "there", 2)["baselines"]


def test_the_run_ends_where_it_was_told_to(tmp_path):
    ended, _ = train(tmp_path / "abort", {(3, 1): 10.0}, "--guard.action", "abort", "--training.steps", "4")
    assert ended.startswith("the loss rose to ") and ended.endswith(" in step 3; the newest checkpoint is of step 2")
    assert len(runs.metrics(tmp_path / "abort")) == 3
    spikes, limit = {(step, 0): math.nan for step in (2, 3, 4)}, ("--guard.max_consecutive_skips", "2")
    ended, _ = train(tmp_path / "limit", spikes, *limit, "--training.steps", "5")
    assert ended == "the loss is not finite in step 4; the newest checkpoint is of step 2"
