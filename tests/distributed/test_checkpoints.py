"""Checkpoints exist completely or not at all, hold no pickled code, and are what a start continues from."""

import json
import os
import pickle

import pytest

from tests import processes, runs
from titan_loom.errors import UserError


def complete(folder) -> list[int]:
    from titan_loom.training.checkpoint_files import complete_steps

    return complete_steps(folder / "run" / "checkpoint")


def test_retention_counts_complete_checkpoints_only(tmp_path):
    broken = tmp_path / "run" / "checkpoint" / "step-1000"
    broken.mkdir(parents=True)
    runs.train(tmp_path, "--checkpoint.interval", "4", "--checkpoint.keep_latest_k", "2")
    assert complete(tmp_path) == [16, 20]
    assert broken.exists()


def test_a_half_written_checkpoint_is_passed_over(tmp_path):
    runs.train(tmp_path, "--checkpoint.interval", "5", "--training.steps", "10")
    expected = runs.train(tmp_path, "--training.steps", "20")
    (tmp_path / "run" / "checkpoint" / "step-20" / "train_state.json").unlink()
    rows = runs.train(tmp_path, "--training.steps", "20")
    assert complete(tmp_path) == [5, 10, 20]
    assert [row["loss"] for row in rows] == [row["loss"] for row in expected]


def test_continuing_from_an_older_step_sets_the_later_ones_aside(tmp_path):
    expected = runs.train(tmp_path, "--checkpoint.interval", "5")
    rows = runs.train(tmp_path, "--checkpoint.load_step", "10", "--training.steps", "12")
    assert [row["loss"] for row in rows] == [row["loss"] for row in expected[:12]]
    assert complete(tmp_path) == [5, 10, 12]
    assert (tmp_path / "run" / "checkpoint" / "step-20.superseded-1").exists()


def test_a_new_run_starts_from_the_weights_of_another(tmp_path):
    old = runs.train(tmp_path / "old", "--training.steps", "10")
    path = tmp_path / "old" / "run" / "checkpoint" / "step-10"
    (tmp_path / "new" / "run" / "checkpoint").mkdir(parents=True)  # empty: there is nothing to resume
    new = runs.train(tmp_path / "new", "--training.steps", "1", "--checkpoint.initial_load_path", str(path))
    assert new[0]["step"] == 1
    assert new[0]["batch_sha256"] == old[0]["batch_sha256"]
    assert new[0]["loss"] < old[0]["loss"] - 0.1


def test_the_state_beside_the_tensors_is_readable_json(tmp_path):
    runs.train(tmp_path, "--training.steps", "2")
    state = json.loads((tmp_path / "run" / "checkpoint" / "step-2" / "train_state.json").read_text())
    assert state["step"] == 2
    assert state["tokens_seen"] == 2 * 8 * 64 == sum(state["source_tokens"].values())
    assert sorted(state["lanes"]) == ["0", "1", "2", "3"]
    assert state["config"]["training"]["seq_len"] == 64
    assert {"torch", "titan_loom"} <= state["versions"].keys()


class _Malicious:
    def __reduce__(self):
        return os.mkdir, ("planted",)


def test_a_planted_pickle_is_refused_and_not_run(tmp_path, monkeypatch):
    runs.train(tmp_path, "--training.steps", "2")
    path = tmp_path / "run" / "checkpoint" / "step-2"
    (path / ".metadata").write_bytes(pickle.dumps(_Malicious()))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match="has no place in a checkpoint of tensors"):
        runs.train(tmp_path, "--training.steps", "3")
    assert not (tmp_path / "planted").exists()


def _train_on_a_full_disk(argv: list[str], full_on: str) -> str:
    from titan_loom.config.loading import load_config
    from titan_loom.trainer import Trainer
    from titan_loom.training import checkpoint

    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    trainer = Trainer(load_config(argv))
    if full_on == "rank 0's state":
        checkpoint._fsync_folder = full_disk
    elif trainer.rank == 1:
        checkpoint.dcp.FileSystemWriter.write_data = full_disk
    try:
        trainer.train()
    except RuntimeError as error:
        return str(error)
    finally:
        trainer.close()


@pytest.mark.parametrize("full_on", ["rank 0's state", "rank 1's tensors"])
def test_a_full_disk_leaves_what_was_there(tmp_path, full_on):
    runs.train(tmp_path, "--training.steps", "5")
    argv = ["--job.config_file", str(tmp_path / "small.toml"), "--job.dump_folder", str(tmp_path / "run")]
    messages = processes.run(_train_on_a_full_disk, 2, [*argv, "--training.steps", "10"], full_on)
    assert all("No space left on device" in message for message in messages)
    assert complete(tmp_path) == [5]
    assert not list((tmp_path / "run" / "checkpoint").glob(".step-*"))
    assert runs.train(tmp_path, "--training.steps", "10")[-1]["step"] == 10


def test_another_model_and_other_data_are_refused(tmp_path):
    from titan_loom.config.loading import load_config
    from titan_loom.training.checkpoint_files import find_start

    runs.train(tmp_path, "--training.steps", "2")
    folder = ["--job.config_file", str(tmp_path / "small.toml"), "--job.dump_folder", str(tmp_path / "run")]
    state = json.loads((tmp_path / "run" / "checkpoint" / "step-2" / "train_state.json").read_text())
    args, data = state["model"]["args"], state["data"]
    assert find_start(load_config(folder), args, data).state["step"] == 2
    with pytest.raises(UserError, match=r"model\.args\.dim is 64 here and 32 there"):
        find_start(load_config(folder), args | {"dim": 64}, data)
    with pytest.raises(UserError, match=r"data\.lanes is 8 .* was made with 4"):
        find_start(load_config(folder), args, data | {"data.lanes": 8})
    with pytest.raises(UserError, match=r"checkpoint\.load_step is 7 but the steps in .* are: 2"):
        find_start(load_config([*folder, "--checkpoint.load_step", "7"]), args, data)
    with pytest.raises(UserError, match=r"checkpoint\.resume is false"):
        find_start(load_config([*folder, "--checkpoint.resume", "false"]), args, data)
