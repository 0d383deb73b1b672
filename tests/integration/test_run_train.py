"""run_train.sh itself: what a person types, what comes out, what is left behind."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests import processes, runs

REPOSITORY = Path(__file__).parents[2]


def start(folder: Path, *overrides: str, **environment: str) -> subprocess.Popen:
    folder.mkdir(exist_ok=True)
    (folder / "small.toml").write_text(runs.SMALL)
    return subprocess.Popen(
        [REPOSITORY / "run_train.sh", "--job.dump_folder", "run", *overrides],
        cwd=folder,
        env=os.environ | {"CONFIG_FILE": "small.toml"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def steps(n: int) -> tuple[str, ...]:
    return "--training.steps", str(n), "--lr_scheduler.total_steps", str(n)


def run(folder: Path, *overrides: str, **environment: str) -> tuple[int, str, str]:
    process = start(folder, *overrides, **environment)
    output, errors = process.communicate(timeout=110)
    return process.returncode, output, errors


def test_a_run_from_another_folder_and_its_second_start(tmp_path):
    export = ("--checkpoint.last_save_in_hf", "--checkpoint.export_dtype", "bfloat16")
    status, output, errors = run(tmp_path, "--training.steps", "3", *export, NGPU="2")
    assert status == 0, errors
    assert output.count("step:  3  loss:") == 1
    assert output.count("Exported the last checkpoint to run/hf/step-3") == 1
    assert json.loads((tmp_path / "run" / "hf" / "step-3" / "config.json").read_text())["dtype"] == "bfloat16"
    assert [row["step"] for row in runs.metrics(tmp_path)] == [1, 2, 3]
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {
        "config.toml",
        "metrics.jsonl",
        "checkpoint",
        "logs",
    }

    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    weights = tmp_path / "run" / "hf" / "step-3" / "model.safetensors"
    exported = weights.read_bytes()
    shutil.rmtree(tmp_path / "run" / "hf")
    status, output, errors = run(tmp_path, "--training.steps", "3", *export)
    assert status == 0
    assert "finished" in output
    assert weights.read_bytes() == exported
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_the_tiny_mixture_of_experts_packs_its_text_and_trains(tmp_path):
    corpus = REPOSITORY / "tests" / "assets" / "corpus"
    status, output, errors = run(
        tmp_path,
        *("--data.sources.code.path", str(corpus / "repositories.jsonl"), "--data.holdout_percent", "20"),
        *("--data.sources.prose.path", str(corpus / "prose.jsonl"), "--validation.steps", "1"),
        *("--training.steps", "6", "--training.seq_len", "63", "--diagnostics.interval", "6"),
        CONFIG_FILE=str(REPOSITORY / "train_configs" / "loom_debug.toml"),
    )
    assert status == 0, output + errors
    rows = runs.metrics(tmp_path)
    assert [[part["loops"] for part in row["segments"]] for row in rows] == [[[0, 1], [1, 2], [2, 3]]] * 6
    assert not any("spike" in row for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.5
    assert {"validation/loop/3/loss", "loop/3/angle", "expert/distinct"} <= rows[-1].keys()
    assert len(list((tmp_path / "outputs" / "packs").glob("*/metadata.json"))) == 2


def test_the_effective_configuration_runs_again_as_it_is(tmp_path):
    first = runs.train(tmp_path, "--training.steps", "2")
    (tmp_path / "run" / "config.toml").rename(tmp_path / "again.toml")
    status, _, errors = run(tmp_path, "--job.dump_folder", "again/run", CONFIG_FILE="again.toml")
    assert status == 0, errors
    assert [row["loss"] for row in runs.metrics(tmp_path / "again")] == [row["loss"] for row in first]


def test_sigterm_saves_the_step_that_was_running_and_the_run_continues_exactly(tmp_path):
    expected = runs.train(tmp_path / "whole", *steps(20))
    process = start(tmp_path / "stopped", *steps(20), "--metrics.log_freq", "1", NGPU="2")
    processes.read_until(process, "step:  5")
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=110)
    assert process.returncode == 1, errors
    assert "stopped by SIGTERM" in output + errors
    saved = [int(path.name[5:]) for path in (tmp_path / "stopped" / "run" / "checkpoint").iterdir()]
    assert len(saved) == 1 and 5 <= saved[0] < 20
    assert run(tmp_path / "stopped", *steps(20), NGPU="2")[0] == 0
    rows = runs.metrics(tmp_path / "stopped")
    assert [row["batch_sha256"] for row in rows] == [row["batch_sha256"] for row in expected]


def test_a_killed_run_loses_at_most_one_interval(tmp_path):
    overrides = (*steps(24), "--checkpoint.interval", "4", "--metrics.log_freq", "1")
    expected = runs.train(tmp_path / "whole", *overrides)
    process = start(tmp_path / "killed", *overrides, "--training.dataloader.num_workers", "2")
    processes.read_until(process, "step: 11")
    processes.kill_tree(process)
    reached = len(runs.metrics(tmp_path / "killed"))
    status, output, errors = run(tmp_path / "killed", *overrides)
    assert status == 0, errors
    saved = int(re.search(r"Training starts at step (\d+)", output)[1]) - 1
    assert saved % 4 == 0 and 0 <= reached - saved <= 4
    keys = ("step", "loss", "grad_norm", "batch_sha256")
    rows = runs.metrics(tmp_path / "killed")
    assert [[row[key] for key in keys] for row in rows] == [[row[key] for key in keys] for row in expected]


def test_workers_leave_when_the_launcher_is_killed(tmp_path):
    process = start(tmp_path, *steps(100_000), "--metrics.log_freq", "1", "--checkpoint.interval", "100000")
    processes.read_until(process, "step:  3")
    workers = processes.descendants(process.pid)
    process.kill()
    process.wait()
    processes.assert_gone(workers, seconds=20)
    assert list((tmp_path / "run" / "checkpoint").glob("step-*"))


def test_a_worker_that_has_just_started_leaves_with_its_launcher(tmp_path):
    """It once waited 300 seconds for the others to join."""
    process = start(tmp_path, NGPU="2")
    while len(workers := processes.descendants(process.pid)) < 2:
        time.sleep(0.01)
    process.kill()
    process.wait()
    processes.assert_gone(workers, seconds=10)


@pytest.mark.parametrize(
    ("overrides", "key", "hint"),
    [
        (["--training.steps", "many"], "training.steps", "many"),  # without torch
        (["--data.sources.code.path", "nowhere"], "data.sources.code.path", "nowhere"),  # by the launcher
        (["--model.expected_parameters", "5"], "model.expected_parameters", "5"),  # with the model, by the workers
    ],
)
def test_a_mistake_is_one_sentence_and_status_2(tmp_path, overrides, key, hint):
    status, output, errors = run(tmp_path, *overrides)
    assert status == 2, output + errors
    assert "Traceback" not in output + errors
    [sentence] = errors.strip().splitlines()
    assert key in sentence and hint in sentence
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_inspect_and_the_run_agree_on_the_model(tmp_path):
    (tmp_path / "small.toml").write_text(runs.SMALL)
    output = subprocess.run(
        ["titan-loom", "inspect", "--job.config_file", tmp_path / "small.toml", "--json"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    parameters = json.loads(output)["parameters"]["total"]
    status, output, _ = run(tmp_path, "--training.steps", "1", "--model.expected_parameters", str(parameters))
    assert status == 0
    assert f"{parameters:,} total parameters" in output
