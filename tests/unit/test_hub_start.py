"""What a run takes from the Hub, and that it takes nothing for granted: "no" is not "no answer"."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from tests.exports import TINY, make_checkpoint
from tests.hub_server import FOREVER
from tests.hub_server.admin import files_below
from titan_loom.config import Checkpoint, Hub, Job, JobConfig
from titan_loom.errors import RunError, UserError
from titan_loom.hub import convert, repository, training_state
from titan_loom.hub.checkpoints import read_tensors
from titan_loom.hub.start import find_start, parse, without_hub
from titan_loom.models import build_model
from titan_loom.training import checkpoint_files

NAME = "Owner/model"


@pytest.fixture(autouse=True)
def client(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_IMPLICIT_TOKEN", False)
    monkeypatch.setattr(repository, "TRIES", 2)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr(checkpoint_files, "_check_extendable", lambda *_: None)  # these checkpoints are no run's


def start(folder: Path, *, hub: dict | None = None, **checkpoint):
    """Where a run in `folder` starts, and its id."""
    config = JobConfig(
        job=Job(dump_folder=str(folder)),
        hub=Hub(**{"timeout_seconds": 0.5} | (hub or {})),
        checkpoint=Checkpoint(**checkpoint),
    )
    return find_start(config, json.loads(json.dumps(vars(TINY))))


def push(hub, folder: Path, step: int = 3, **planted: bytes) -> None:
    """Put an export and its training state on the Hub."""
    make_checkpoint(folder / f"step-{step}", step=step)
    convert.to_hf(folder / f"step-{step}", folder / "export")
    training_state.write(folder / f"step-{step}", folder / "export" / training_state.FOLDER)
    hub.commit(NAME, files_below(folder / "export") | planted, repo_type="model")


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    tensors = {f"model.{name}": torch.empty_like(tensor) for name, tensor in build_model(TINY).state_dict().items()}
    read_tensors(checkpoint, checkpoint_files.read_state(checkpoint, ""), tensors)
    return tensors


def test_a_repository_is_made_at_start_and_is_this_runs(hub, tmp_path):
    found, run_id = start(tmp_path, hub={"repo_id": NAME})
    assert found is None and len(run_id) == 32
    assert hub.repo(NAME, "model").tags == {} and hub.count("auth-check") == 1


@pytest.mark.parametrize(
    ("where", "status", "raises", "part"),
    [
        ("whoami", 401, UserError, "the Hub refuses (status 401 of /api/whoami-v2)"),
        ("create", 403, UserError, "the Hub refuses (status 403 of /api/repos/create)"),
        ("auth-check", 403, UserError, "or `hf auth login` may read and, to push, write it"),
        ("whoami", 500, RunError, "does not answer (status 500 of /api/whoami-v2)"),
        ("create", 503, RunError, "nothing was changed, start again when it does"),
        ("refs|resolve", 500, RunError, "does not answer"),
    ],
)
def test_what_may_not_be_written_or_does_not_answer_is_one_sentence(hub, tmp_path, where, status, raises, part):
    hub.fault(where, do="status", status=status, times=FOREVER)
    with pytest.raises(raises) as error:
        start(tmp_path, hub={"repo_id": NAME})
    assert "hub.repo_id is 'Owner/model', but" in str(error.value) and part in str(error.value)
    assert "\n" not in str(error.value) and "hf_secret" not in str(error.value)


def test_a_hub_that_hangs_and_a_token_that_is_none_are_told(hub, tmp_path, monkeypatch):
    hub.fault("whoami", do="stall", times=FOREVER)
    with pytest.raises(RunError, match=r"does not answer \(ReadTimeout"):
        start(tmp_path, hub={"repo_id": NAME})
    monkeypatch.setenv("HF_TOKEN", "hf_\vsecret")  # the HTTP library quotes it
    with pytest.raises(RunError, match=r"does not answer \(LocalProtocolError: a header is not valid\)"):
        start(tmp_path, hub={"repo_id": NAME})
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr("huggingface_hub.hf_api.get_token", lambda: None)
    with pytest.raises(UserError, match="there is no token: set HF_TOKEN or run `hf auth login`"):
        start(tmp_path, hub={"repo_id": NAME})


def test_another_runs_repository_is_refused_without_leave(hub, tmp_path):
    hub.commit(NAME, {"training_metadata.json": b'{"run_id": "other"}'}, repo_type="model")
    with pytest.raises(UserError, match="holds the steps of another run: choose another repository"):
        start(tmp_path, hub={"repo_id": NAME})
    assert start(tmp_path, hub={"repo_id": NAME, "overwrite": True})[0] is None
    hub.commit(NAME, {"training_metadata.json": None, "model.bin": b"weights"}, repo_type="model")
    with pytest.raises(UserError, match="holds files that no run has pushed"):
        start(tmp_path, hub={"repo_id": NAME})


def test_the_newer_of_the_local_and_the_hubs_state_is_taken(hub, tmp_path):
    push(hub, tmp_path / "pushed", step=3)
    options = {"repo_id": NAME, "resume": True}
    found, run_id = start(tmp_path / "run", hub=options)
    assert found.path == tmp_path / "run" / "checkpoint" / "step-3" and run_id == "abc" and not found.model_only
    pushed = tmp_path / "pushed" / "step-3"
    assert found.state["lanes"] == checkpoint_files.read_state(pushed, "")["lanes"] != {}
    tensors = tensors_of(found.path)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in tensors_of(pushed).items())
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]

    (tmp_path / "run" / "metrics.jsonl").write_text("its own")
    make_checkpoint(tmp_path / "run" / "checkpoint" / "step-4", step=4)
    assert start(tmp_path / "run", hub=options)[0].state["step"] == 4
    shutil.rmtree(tmp_path / "run" / "checkpoint" / "step-4")
    assert start(tmp_path / "run", hub=options)[0].state["step"] == 3
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "its own"


@pytest.mark.parametrize(
    ("where", "do"), [("revision", "status"), ("revision", "stall"), ("tree", "status"), ("resolve", "status")]
)
def test_a_hub_that_does_not_answer_is_not_one_without_a_state(hub, tmp_path, where, do):
    options = {"repo_id": NAME, "resume": True}
    assert start(tmp_path / "run", hub=options)[0] is None
    push(hub, tmp_path / "pushed")
    hub.fault(where, do=do, times=FOREVER)
    before = files_below(tmp_path / "run")
    with pytest.raises(RunError, match="nothing was changed"):
        start(tmp_path / "run", hub=options)
    with pytest.raises(RunError, match="nothing was changed"):
        start(tmp_path / "run", initial_load_path=f"hf://{NAME}")
    assert files_below(tmp_path / "run") == before


@pytest.mark.parametrize("name", [".metadata", "optimizer.pt", "tensors-00000.safetensors"])
def test_a_state_that_holds_a_pickle_is_refused(hub, tmp_path, name):
    bomb = pickle.dumps(Path(tmp_path / "was run").touch)
    push(hub, tmp_path / "pushed", **{f"{training_state.FOLDER}/{name}": bomb})
    with pytest.raises(UserError, match=r"which may run code|is damaged"):
        start(tmp_path / "run", hub={"repo_id": NAME, "resume": True})
    with pytest.raises(UserError, match=r"which may run code|is damaged"):
        start(tmp_path / "run", initial_load_path=f"hf://{NAME}", initial_load_model_only=False)
    assert not (tmp_path / "was run").exists() and not list(tmp_path.glob("run/checkpoint/*"))


def test_a_run_starts_from_an_export_and_from_a_state(hub, tmp_path):
    push(hub, tmp_path / "pushed")
    hub.tag(NAME, "v1", repo_type="model")
    commit = hub.commit(NAME, {"config.json": None}, repo_type="model")
    found, run_id = start(tmp_path / "run", initial_load_path=f"hf://{NAME}@v1")
    assert found.model_only and run_id != "abc"
    expected = tensors_of(tmp_path / "pushed" / "step-3")
    assert all(torch.equal(expected[name], tensor) for name, tensor in tensors_of(found.path).items())

    found, _ = start(tmp_path / "run", initial_load_path=f"hf://{NAME}", initial_load_model_only=False)
    assert not found.model_only and found.state["lanes"] and found.path.name == f"{commit}-state"
    requests = hub.count("resolve")
    start(tmp_path / "run", initial_load_path=f"hf://{NAME}", initial_load_model_only=False)
    assert hub.count("resolve") == requests

    make_checkpoint(tmp_path / "run" / "checkpoint" / "step-4", step=4)
    assert start(tmp_path / "run", initial_load_path="hf://Owner/gone")[0].state["step"] == 4


def test_a_path_that_is_none_is_one_sentence(hub, tmp_path):
    assert parse("hf://a/b") == ("a/b", "main") and parse("hf://a/b@v1") == ("a/b", "v1")
    with pytest.raises(UserError, match="it must be hf://owner/name"):
        without_hub(JobConfig(checkpoint=Checkpoint(initial_load_path="hf://name")))
    with pytest.raises(UserError, match="initial_load_path is 'hf://Owner/gone', but the Hub refuses"):
        start(tmp_path, initial_load_path="hf://Owner/gone")
    hub.commit(NAME, {"config.json": b"{}"}, repo_type="model")
    with pytest.raises(UserError, match="holds no training state"):
        start(tmp_path, initial_load_path=f"hf://{NAME}", initial_load_model_only=False)
