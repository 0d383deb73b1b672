"""Checkpoints exist completely or not at all, hold no pickled code, and are what a start continues from."""

import json
import os
import pickle
import re
import resource
import shutil

import pytest

from tests import processes, runs
from titan_loom.errors import RunError, UserError
from titan_loom.training.checkpoint_files import checksum, read_state, write_state


def start(folder, *overrides: str) -> list[str]:
    """The arguments that continue the run in `folder`."""
    return ["--job.config_file", str(folder / "small.toml"), "--job.dump_folder", str(folder / "run"), *overrides]


def _sentence(argv: list[str]) -> str | None:
    """What a start is refused with."""
    from titan_loom.config.loading import load_config
    from titan_loom.trainer import Trainer

    try:
        Trainer(load_config(argv)).close()
    except UserError as error:
        return str(error)


def complete(folder) -> list[int]:
    from titan_loom.training.checkpoint_files import complete_steps

    return complete_steps(folder / "run" / "checkpoint")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A run of two processes with checkpoints of the steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("original")
    runs.train(folder, "--checkpoint.interval", "2", "--training.steps", "6", world_size=2)
    return folder


@pytest.fixture
def finished(original, tmp_path):
    """The newest checkpoint of a copy of that run in `tmp_path`."""
    shutil.copytree(original, tmp_path, dirs_exist_ok=True)
    return tmp_path / "run" / "checkpoint" / "step-6"


def test_retention_counts_complete_checkpoints_that_are_no_snapshots(tmp_path):
    broken = tmp_path / "run" / "checkpoint" / "step-1000"
    broken.mkdir(parents=True)
    retention = ("--checkpoint.keep_latest_k", "2", "--checkpoint.snapshot_interval", "2")
    runs.train(tmp_path, *("--checkpoint.interval", "1", *retention, "--training.steps", "6"))
    assert complete(tmp_path) == [2, 3, 4, 5, 6]
    assert broken.exists()


def test_a_half_written_checkpoint_is_passed_over(tmp_path):
    expected = runs.train(tmp_path, "--checkpoint.interval", "2", "--training.steps", "5")
    (tmp_path / "run" / "checkpoint" / "step-5" / "train_state.json").unlink()
    rows = runs.train(tmp_path, "--training.steps", "5")
    assert complete(tmp_path) == [2, 4, 5]
    assert [row["loss"] for row in rows] == [row["loss"] for row in expected]


def test_continuing_from_an_older_step_sets_the_later_ones_aside(tmp_path, finished):
    expected = runs.metrics(tmp_path)
    rows = runs.train(tmp_path, "--checkpoint.load_step", "2", "--training.steps", "3", world_size=2)
    assert [row["loss"] for row in rows] == [row["loss"] for row in expected[:3]]
    assert complete(tmp_path) == [2, 3]
    assert finished.with_name("step-6.superseded-1").exists()


def test_a_new_run_starts_from_the_weights_of_another(tmp_path):
    old = runs.train(tmp_path / "old", "--training.steps", "10")
    path = tmp_path / "old" / "run" / "checkpoint" / "step-10"
    (tmp_path / "new" / "run" / "checkpoint").mkdir(parents=True)  # empty: there is nothing to resume
    new = runs.train(tmp_path / "new", "--training.steps", "1", "--checkpoint.initial_load_path", str(path))
    assert new[0]["step"] == 1
    assert new[0]["batch_sha256"] == old[0]["batch_sha256"]
    assert new[0]["loss"] < old[0]["loss"] - 0.1


def test_the_state_beside_the_tensors_is_readable_json(finished):
    state = json.loads((finished / "train_state.json").read_text())
    assert state["step"] == 6
    assert state["tokens_seen"] == 6 * 8 * 64 == sum(state["source_tokens"].values())
    assert sorted(state["lanes"]) == ["0", "1", "2", "3"]
    assert state["config"]["training"]["seq_len"] == 64
    assert {"torch", "titan_loom"} <= state["versions"].keys()


class _Malicious:
    def __reduce__(self):
        return os.mkdir, ("planted",)


def test_a_planted_pickle_is_refused_and_not_run(tmp_path, finished, monkeypatch):
    (finished / ".metadata").write_bytes(pickle.dumps(_Malicious()))
    state = read_state(finished, "")
    state["files"][".metadata"] = checksum(finished / ".metadata")  # whoever plants it can add it up as well
    write_state(finished, state)
    monkeypatch.chdir(tmp_path)
    for sentence in processes.run(_sentence, 2, start(tmp_path, "--training.steps", "7")):
        assert f"{finished} is damaged" in sentence and "has no place in a checkpoint of tensors" in sentence
    assert not (tmp_path / "planted").exists()


def _invert_bytes(path):
    contents = path.read_bytes()
    path.write_bytes(contents[:9000] + bytes(255 - byte for byte in contents[9000:9200]) + contents[9200:])


@pytest.mark.parametrize(
    ("file", "damage", "what"),
    [
        ("__0_0.distcp", _invert_bytes, "has other contents than were written"),
        ("__1_0.distcp", lambda path: os.truncate(path, 5000), "has 5000 bytes instead of"),
        ("__1_0.distcp", lambda path: path.unlink(), "cannot be read: No such file or directory"),
        (".metadata", lambda path: os.truncate(path, 0), "has 0 bytes instead of"),
    ],
)
def test_a_damaged_file_is_one_sentence_with_a_way_on(finished, tmp_path, file, damage, what):
    """Inverted bytes were once loaded as weights, and a missing file was a traceback."""
    damage(finished / file)
    expected = f"checkpoint {finished} is damaged, {file} {what}.*: continue .* with --checkpoint.load_step 4"
    for sentence in processes.run(_sentence, 2, start(tmp_path, "--training.steps", "7")):
        assert re.fullmatch(expected, sentence)
    assert complete(tmp_path) == [2, 4, 6]


def test_nothing_is_set_aside_or_deleted_for_a_checkpoint_that_cannot_be_read(finished, tmp_path):
    folder = finished.parent
    _invert_bytes(folder / "step-2" / "__0_0.distcp")
    before = (tmp_path / "run" / "config.toml").read_text()
    sentences = processes.run(_sentence, 1, start(tmp_path, "--checkpoint.load_step", "2"))
    assert sentences[0].endswith("there is no older one, so start again in another job.dump_folder")
    afresh = ["--checkpoint.resume", "false", "--job.overwrite", "true"]
    weights = ["--checkpoint.initial_load_path", str(folder / "step-2")]
    sentences = processes.run(_sentence, 1, start(tmp_path, *afresh, *weights))
    assert sentences[0].endswith("choose another checkpoint.initial_load_path")
    assert complete(tmp_path) == [2, 4, 6]
    assert (tmp_path / "run" / "config.toml").read_text() == before
    assert processes.run(_sentence, 1, start(tmp_path, "--checkpoint.load_step", "4")) == [None]


def _failure(argv: list[str], prepare, *args) -> str | None:
    """What ends a run after `prepare(trainer, *args)`."""
    from titan_loom.config.loading import load_config
    from titan_loom.trainer import Trainer

    trainer = Trainer(load_config(argv))
    prepare(trainer, *args)
    try:
        trainer.train()
    except RunError as error:
        return str(error)
    finally:
        trainer.close()


def _fill_disk(trainer, where: str) -> None:
    from titan_loom.training import checkpoint

    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    if where == "rank 0's folder":
        checkpoint.make_empty = full_disk
    elif where == "rank 0's state":
        checkpoint._fsync_folder = full_disk
    elif where == "rank 0's metrics":
        trainer.metrics._report_window = full_disk
    elif trainer.rank == 1:
        checkpoint.dcp.FileSystemWriter.write_data = full_disk


def test_a_full_disk_is_one_sentence_and_leaves_what_was_there(tmp_path, finished):
    for where in ("rank 0's folder", "rank 0's state", "rank 0's metrics", "rank 1's tensors"):
        for message in processes.run(_failure, 2, start(tmp_path, "--training.steps", "7"), _fill_disk, where):
            assert re.fullmatch(r".* could not be written.*: \[Errno 28\] No space left on device", message), where
        assert complete(tmp_path) == [2, 4, 6]
        assert not list(finished.parent.glob(".step-*"))
    assert runs.train(tmp_path, "--training.steps", "7")[-1]["step"] == 7


def _limit_file_size(trainer) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))


def test_what_the_system_said_is_the_reason_and_not_what_torch_made_of_it(tmp_path, finished):
    messages = processes.run(_failure, 1, start(tmp_path, "--training.steps", "7"), _limit_file_size)
    assert messages[0].endswith("step-7 could not be written: [Errno 27] File too large")


def _spoil_weights(trainer) -> None:
    import torch

    with torch.no_grad():
        next(trainer.model.parameters()).fill_(float("nan"))


def test_a_loss_that_is_not_finite_ends_the_run_and_says_what_is_left(tmp_path, finished):
    sentence, abort = "the loss is not finite in step {}; {}", ("--guard.action", "abort")
    messages = processes.run(_failure, 2, start(tmp_path, "--training.steps", "8", *abort), _spoil_weights)
    assert messages == [sentence.format(7, "the newest checkpoint is of step 6")] * 2
    unsaved = ["--job.dump_folder", str(tmp_path / "unsaved"), "--checkpoint.enable", "false"]
    messages = processes.run(_failure, 1, start(tmp_path, *unsaved, *abort), _spoil_weights)
    assert messages == [sentence.format(1, "nothing was saved")]
    assert complete(tmp_path) == [2, 4, 6]


def test_another_model_and_other_data_are_refused(tmp_path, finished):
    from titan_loom.config.loading import load_config
    from titan_loom.training.checkpoint_files import find_start

    folder = start(tmp_path)
    state = json.loads((finished / "train_state.json").read_text())
    args, data = state["model"]["args"], state["data"]
    assert find_start(load_config(folder), args, data).state["step"] == 6
    with pytest.raises(UserError, match=r"model\.args\.dim is 64 here and 32 there"):
        find_start(load_config(folder), args | {"dim": 64}, data)
    with pytest.raises(UserError, match=r"data\.lanes is 8 .* was made with 4"):
        find_start(load_config(folder), args, data | {"data.lanes": 8})
    with pytest.raises(UserError, match=r"checkpoint\.load_step is 7 but the steps in .* are: 2, 4, 6"):
        find_start(load_config([*folder, "--checkpoint.load_step", "7"]), args, data)
    with pytest.raises(UserError, match=r"checkpoint\.resume is false"):
        find_start(load_config([*folder, "--checkpoint.resume", "false"]), args, data)
