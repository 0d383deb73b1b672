"""Runs that push their milestones to a Hub on this machine: through outages and kills, and on from there elsewhere."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests import processes, runs
from tests.hub_server import FOREVER, HubServer

REPOSITORY = Path(__file__).parents[2]
NAME, TOKEN = "Owner/model", "hf_neverwrittenanywhere"

TAGS = ["checkpoint-025pct", "checkpoint-050pct", "checkpoint-075pct", "checkpoint-100pct"]


@pytest.fixture
def hub():
    with HubServer() as server:
        yield server


def start(hub: HubServer, folder: Path, *overrides: str, processes: int = 1) -> subprocess.Popen:
    folder.mkdir(exist_ok=True)
    (folder / "small.toml").write_text(runs.SMALL)
    options = ["--hub.repo_id", NAME, "--hub.milestones", "25%, 50%, 75%, 100%", "--hub.timeout_seconds", "1"]
    options += ["--training.steps", "4", "--metrics.log_freq", "1", "--checkpoint.keep_latest_k", "2"]
    return subprocess.Popen(
        [REPOSITORY / "run_train.sh", "--job.dump_folder", "run", *options, *overrides],
        cwd=folder,
        env=os.environ | hub.environment(folder, TOKEN) | {"CONFIG_FILE": "small.toml", "NGPU": str(processes)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def pushed(hub: HubServer) -> dict[str, int]:
    """The step of each tag; every step is there once."""
    repo = hub.repo(NAME, "model")
    titles = [commit.title for commit in repo.history("main")]
    assert len(titles) == len(set(titles)), titles
    return {tag: int(repo.find(tag).title.split()[1]) for tag in repo.tags}


def test_an_outage_costs_a_run_a_warning_and_no_milestone(hub, tmp_path):
    hub.fault("commit", do="status", times=2)
    hub.fault("tag", do="stall", method="POST", after=1)
    hub.fault("lfs-put", do="cut", after=2)
    process = start(hub, tmp_path)
    output, errors = process.communicate(timeout=110)
    assert process.returncode == 0, errors
    assert pushed(hub) == {tag: step for step, tag in enumerate(TAGS, start=1)}
    files = hub.repo(NAME, "model").find("checkpoint-050pct").files
    assert {"model.safetensors", "modeling_nanocoder.py", "training_metadata.json"} < files.keys()
    assert output.count("Pushing step-1 to Owner/model has failed: status 500") == 1
    assert "Traceback" not in output + errors
    # Its checkpoint had long been deleted when the first one was pushed.
    assert output.index("Saved checkpoint run/checkpoint/step-4") < output.index("Pushed step 1 to Owner/model")
    assert {path.name for path in (tmp_path / "run" / "checkpoint").iterdir()} == {"step-3", "step-4"}
    assert not list((tmp_path / "run" / "outbox").iterdir())
    assert TOKEN not in output + errors
    assert not [path for path, content in contents(tmp_path).items() if TOKEN.encode() in content]
    a_start_is_refused_while_the_hub_is_silent(hub, tmp_path)


def a_start_is_refused_while_the_hub_is_silent(hub, folder):
    """One sentence, and what the run in `folder` left is there afterwards, also where it was to be replaced."""
    hub.fault("", do="stall", times=FOREVER)
    shutil.copytree(folder, replaced := folder.with_name("replaced"))
    before = contents(folder)
    instead = ("--hub.repo_id", "none", "--checkpoint.resume", "false", "--job.overwrite")
    instead += ("--checkpoint.initial_load_path", f"hf://{NAME}")
    refused = {
        f"hub.repo_id is '{NAME}'": start(hub, folder, "--hub.resume", "--training.steps", "8", processes=2),
        f"checkpoint.initial_load_path is 'hf://{NAME}'": start(hub, replaced, *instead),
    }
    for found, process in refused.items():
        _, errors = process.communicate(timeout=110)
        assert process.returncode == 1
        assert errors.startswith(f"error: {found}, but the Hub at") and errors.count("\n") == 1, errors
    assert before.items() <= contents(folder).items() & contents(replaced).items()


def test_a_run_that_is_killed_while_it_pushes_goes_on_on_another_machine(hub, tmp_path):
    options = ("--hub.push_training_state", "--lr_scheduler.total_steps", "20", "--training.steps", "8")
    stall = hub.fault("lfs-put", do="stall", after=2, times=FOREVER)  # those of the second milestone
    process = start(hub, tmp_path / "killed", *options)
    deadline = time.monotonic() + 90
    while not stall.hits:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    processes.kill_tree(process)
    process.communicate()
    hub.faults.clear()
    assert pushed(hub) == {"checkpoint-025pct": 2}

    process = start(hub, tmp_path / "fresh", *options, "--hub.resume")
    output, errors = process.communicate(timeout=110)
    assert process.returncode == 0, errors
    assert "Training starts at step 3" in output
    assert pushed(hub) == {tag: 2 * step for step, tag in enumerate(TAGS, start=1)}
    rows = runs.metrics(tmp_path / "fresh")
    assert [row["step"] for row in rows] == list(range(1, 9))
    whole = [row["loss"] for row in runs.metrics(tmp_path / "killed")]
    assert len(whole) > 2 and [row["loss"] for row in rows][: len(whole)] == whole
