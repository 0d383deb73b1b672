"""Checkpoints reach the Hub in order, once, and whatever happens on the way."""

import json
import logging
import os

import pytest

pytest.importorskip("transformers")

from tests.exports import make_checkpoint
from titan_loom.config import Hub, Job, JobConfig, Training
from titan_loom.config.milestones import milestone_tags
from titan_loom.hub import training_state
from titan_loom.hub.outbox import Outbox
from titan_loom.hub.push import Pusher
from titan_loom.tools.logging import logger
from titan_loom.training.signals import StopRequest

NAME = "Owner/model"
QUARTERS = ["25%", "50%", "75%", "100%"]


@pytest.fixture
def repository(hub, monkeypatch, caplog):
    """Makes the repository; gives a function that pushes what a folder holds, as a process of its own would."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_IMPLICIT_TOKEN", False)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # huggingface_hub repeats some requests, too
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level(logging.INFO, "titan_loom")
    hub.hub.create("model", NAME)

    def push_all(folder, steps=4, **options):
        options = {"repo_id": NAME, "timeout_seconds": 2.0, "overwrite": False, "push_training_state": False} | options
        Pusher(folder, options, milestone_tags(QUARTERS, Training(steps=steps)), "float32", None).push_all()

    push_all.log = caplog
    push_all.repo = hub.repo(NAME, "model")
    return push_all


def titles(repo) -> list[str]:
    return [commit.title for commit in repo.history("main")][-2::-1]


def contents(repo, revision: str, path: str) -> bytes:
    content = repo.find(revision).files[path]
    return b"".join(content.chunks(0, content.size))


def step_of(repo, tag: str) -> int:
    return json.loads(contents(repo, tag, "training_metadata.json"))["step"]


def test_each_milestone_is_one_commit_with_its_tag(repository, tmp_path):
    for step in (4, 2, 3):
        make_checkpoint(tmp_path / f"step-{step}", step=step)
    repository(tmp_path, push_training_state=True)
    repo = repository.repo
    assert titles(repo) == [f"Step {step} of run abc" for step in (2, 3, 4)]
    assert {tag: step_of(repo, tag) for tag in repo.tags} == {
        "checkpoint-050pct": 2,
        "checkpoint-075pct": 3,
        "checkpoint-100pct": 4,
    }
    files = set(repo.find("checkpoint-075pct").files)
    assert {"model.safetensors", "config.json", "README.md", "metrics.jsonl", "tokenizer.json"} < files
    assert {f"{training_state.FOLDER}/train_state.json", f"{training_state.FOLDER}/tensors-00000.safetensors"} < files
    assert list(tmp_path.iterdir()) == []

    make_checkpoint(tmp_path / "step-3", step=3)  # of a run that went back
    repository(tmp_path)
    assert len(titles(repo)) == 3


@pytest.mark.parametrize(
    ("where", "do"),
    [(where, "status") for where in ("commits", "preupload", "lfs-batch", "lfs-put", "commit", "tag")]
    + [("lfs-put", "stall"), ("commit", "stall"), ("commit", "cut"), ("tag", "cut")],
)
def test_what_fails_is_tried_again_and_comes_once(repository, hub, tmp_path, where, do):
    fault = hub.fault(where, do=do, times=7 if do == "status" else 1, seconds=1)
    make_checkpoint(tmp_path / "step-1", step=1)
    repository(tmp_path, timeout_seconds=0.5)
    if do == "stall":
        hub.pause(0.7)  # until what was given up is done after all
    assert fault.hits
    assert titles(repository.repo) == ["Step 1 of run abc"]
    assert step_of(repository.repo, "checkpoint-025pct") == 1
    warnings = [text for name, level, text in repository.log.record_tuples if (name, level) == ("titan_loom", 30)]
    assert len(warnings) <= 1 and all("step-1 to Owner/model has failed" in message for message in warnings)
    assert "hf_secret" not in repository.log.text


def test_a_kill_between_commit_and_tag_leaves_neither_hole_nor_double(repository, hub, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def kill(*_):
        raise Killed

    make_checkpoint(tmp_path / "step-2", step=2)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("titan_loom.hub.repository.Repository.tag", kill)
        repository(tmp_path)
    assert repository.repo.tags == {}
    repository(tmp_path)
    assert titles(repository.repo) == ["Step 2 of run abc"]
    assert step_of(repository.repo, "checkpoint-050pct") == 2


def test_a_run_that_was_extended_moves_its_tags(repository, tmp_path):
    make_checkpoint(tmp_path / "step-4", step=4)
    repository(tmp_path)
    make_checkpoint(tmp_path / "step-8", step=8)
    repository(tmp_path, steps=8)
    assert step_of(repository.repo, "checkpoint-100pct") == 8


def test_another_runs_steps_are_replaced_only_with_leave(repository, hub, tmp_path):
    hub.commit(NAME, {"training_metadata.json": b'{"run_id": "other"}'}, repo_type="model")
    for tag in ("checkpoint-090pct", "v1"):
        hub.tag(NAME, tag, repo_type="model")
    make_checkpoint(tmp_path / "step-1", step=1)
    repository(tmp_path)
    assert "Gave up pushing step-1" in repository.log.text and "another run's steps" in repository.log.text
    assert set(repository.repo.tags) == {"checkpoint-090pct", "v1"}

    make_checkpoint(tmp_path / "step-1", step=1)
    repository(tmp_path, overwrite=True)
    assert set(repository.repo.tags) == {"checkpoint-025pct", "v1"}


def test_a_checkpoint_that_cannot_be_exported_is_given_up_and_the_next_comes(repository, tmp_path):
    make_checkpoint(tmp_path / "step-1", step=1)
    (tmp_path / "step-1" / "metrics.jsonl").write_text("no longer what was saved")
    make_checkpoint(tmp_path / "step-2", step=2)
    repository(tmp_path)
    assert "Gave up pushing step-1 to Owner/model: checkpoint" in repository.log.text
    assert set(repository.repo.tags) == {"checkpoint-050pct"}


@pytest.fixture
def outbox(tmp_path, monkeypatch, caplog):
    """An outbox, and a function that puts a checkpoint into it that the run deletes then; nothing is pushed."""
    config = JobConfig(
        job=Job(dump_folder=str(tmp_path)),
        hub=Hub(repo_id=NAME, milestones=[f"{i} steps" for i in range(1, 11)], flush_seconds=0.5),
        training=Training(steps=20),
    )
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr("titan_loom.hub.outbox.COMMAND", ["sh", "-c", "exec sleep 60"])
    box = Outbox(config)

    def add(step: int) -> None:
        folder = tmp_path / "checkpoint" / f"step-{step}"
        folder.mkdir(parents=True)
        (folder / ".metadata").write_text("metadata")
        (folder / "train_state.json").write_text(f"state {step}")
        box.add(folder)
        (folder / "train_state.json").unlink()

    yield box, add
    box.close()


def test_the_outbox_keeps_what_the_run_deletes_and_is_bounded(outbox, tmp_path, caplog):
    _, add = outbox
    for step in range(1, 12):
        add(step)
    kept = {path.name: (path / "train_state.json").read_text() for path in (tmp_path / "outbox").iterdir()}
    assert kept == {f"step-{step}": f"state {step}" for step in range(3, 11)}  # 11 is no milestone
    assert caplog.messages == [
        f"Gave up pushing step {step} (checkpoint-{step}steps) to Owner/model: 8 later checkpoints wait"
        for step in (1, 2)
    ]


def test_the_end_of_a_run_waits_so_long_and_no_longer(outbox, tmp_path, caplog):
    box, add = outbox
    for step in (1, 2):
        add(step)
    process = box._process
    # In a session of its own it once took half of a core, whatever its priority.
    assert os.getsid(process.pid) == os.getsid(0) and os.getpgid(process.pid) == process.pid
    box.flush(StopRequest())
    assert process.poll() is not None
    (message,) = caplog.messages
    assert message.startswith("Gave up pushing step 1 (checkpoint-1steps) to Owner/model, step 2 (checkpoint-2steps)")
    assert "hub.flush_seconds is 0.5" in message and {path.name for path in box.folder.iterdir()} == {
        "step-1",
        "step-2",
    }
