"""Streaming through run_train.sh from a Hub on this machine, with faults and kills."""

import json
import os
import random
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests import processes, runs
from tests.hub_server import FOREVER, HubServer, fineweb_parts, readme, stack_parts

REPOSITORY = Path(__file__).parents[2]
STACK, FINEWEB = "HuggingFaceCode/stack-v3-train", "HuggingFaceFW/fineweb-edu"

SMALL = shlex.split("""
    --model.expected_parameters none --model.flavor debug --model.args.dim 32 --model.args.num_heads 2
    --model.args.num_kv_heads 1 --model.args.head_dim 16 --model.args.ffn_dim 48 --model.args.ngram_rows 101
    --model.args.ngram_dim 8 --compile.enable false --training.global_batch_size 16 --training.local_batch_size 4
    --training.seq_len 64 --training.total_tokens none --training.steps 30 --lr_scheduler.warmup_tokens none
    --training.mixed_precision_param float32 --metrics.enable_tensorboard false --metrics.log_freq 1
    --checkpoint.interval 5 --debug.hash_batches
""")

ENDLESS = ["--training.steps", "100000", "--data.window", "4", "--training.dataloader.prefetch_factor", "1"]
"""Rows are read all along."""


@pytest.fixture
def hub():
    with HubServer() as server:
        server.commit(STACK, stack_parts(5, 40, seed=0, row_group_size=15))
        card = readme({"default": "data/*/*", "sample-10BT": "sample/10BT/*"})
        parts = fineweb_parts(17, 20, seed=1, row_group_size=7, folder="data/CC-1")
        server.commit(FINEWEB, parts | {"README.md": card})
        yield server


def start(hub: HubServer, folder: Path, *overrides: str, **environment: str) -> subprocess.Popen:
    folder.mkdir(exist_ok=True)
    environment = {"CONFIG_FILE": "train_configs/nanocoder.toml", **environment}
    return subprocess.Popen(
        [REPOSITORY / "run_train.sh", "--job.dump_folder", "run", *SMALL, *overrides],
        cwd=folder,
        env=os.environ | hub.environment(folder) | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(hub: HubServer, folder: Path, *overrides: str, **environment: str) -> tuple[int, str, str]:
    process = start(hub, folder, *overrides, **environment)
    output, errors = process.communicate(timeout=110)
    return process.returncode, output, errors


def hashes(folder: Path) -> list[str]:
    return [row["batch_sha256"] for row in runs.metrics(folder)]


def test_a_streamed_run_that_is_killed_continues_exactly(hub, tmp_path):
    status, _, errors = run(hub, tmp_path / "whole")
    assert status == 0, errors
    expected = hashes(tmp_path / "whole")
    assert len(expected) == len(set(expected)) == 30
    assert set(runs.metrics(tmp_path / "whole")[0]["source_wait"]) == {"stack_v3", "fineweb_edu"}

    # At a random moment after the first checkpoint, which the branch has left behind when the run goes on.
    process = start(hub, tmp_path / "killed")
    processes.read_until(process, "step: 10")
    time.sleep(random.uniform(0, 1))
    processes.kill_tree(process)
    assert 10 <= len(hashes(tmp_path / "killed")) < 30
    hub.commit(STACK, stack_parts(2, 40, seed=9, row_group_size=15))
    status, output, errors = run(hub, tmp_path / "killed")
    assert status == 0, errors
    assert "Training starts at step 1 " not in output
    assert hashes(tmp_path / "killed") == expected


def test_four_processes_list_once_and_survive_faults_with_the_same_batches(hub, tmp_path):
    one = ("--training.dataloader.num_workers", "0", "--training.local_batch_size", "16", "--training.steps", "8")
    assert run(hub, tmp_path / "one", *one)[0] == 0
    hub.forget_requests()
    for number, fault in enumerate(("status", "cut", "ignore_range", "truncate", "wrong_bytes")):
        hub.fault("resolve", do=fault, after=20 + 8 * number, times=2)
    four = (*one, "--training.local_batch_size", "4", "--data.streaming.read_timeout_seconds", "2")
    hub.fault("resolve", do="stall", after=30)
    status, _, errors = run(hub, tmp_path / "four", *four, NGPU="4")
    assert status == 0, errors
    assert hashes(tmp_path / "four") == hashes(tmp_path / "one")
    # Two repositories: each listed and resolved once.
    assert (hub.count("tree"), hub.count("revision")) == (2, 2)


def test_a_source_that_is_gone_ends_the_run_with_one_sentence_after_saving(hub, tmp_path):
    overrides = ("--data.streaming.failures_per_hour", "2", "--training.dataloader.num_workers", "2", *ENDLESS)
    process = start(
        hub, tmp_path, *overrides, "--training.local_batch_size", "8", "--checkpoint.interval", "100000", NGPU="2"
    )
    processes.read_until(process, "step:  3")
    hub.fault("data/train", do="status", times=FOREVER)
    output, errors = process.communicate(timeout=100)
    assert process.returncode == 1, errors
    assert "Traceback" not in output + errors
    (sentence,) = [line for line in errors.splitlines() if line.startswith("error: data.sources")]
    assert sentence.startswith("error: data.sources.stack_v3: data/train-")
    assert ", row " in sentence and "status 500; it was failure 3 within an hour" in sentence
    (saved,) = (tmp_path / "run" / "checkpoint").iterdir()
    assert saved.name == f"step-{len(hashes(tmp_path))}"
    hub.faults.clear()
    steps = str(len(hashes(tmp_path)) + 2)
    assert run(hub, tmp_path, *overrides, "--training.steps", steps)[0] == 0


def test_while_one_rank_waits_the_others_say_so_and_a_signal_saves(hub, tmp_path):
    overrides = ("--data.streaming.report_seconds", "1", "--training.dataloader.num_workers", "0", *ENDLESS)
    process = start(
        hub, tmp_path, *overrides, "--training.local_batch_size", "8", "--checkpoint.interval", "100000", NGPU="2"
    )
    processes.read_until(process, "step:  3")
    hub.fault("data/", do="stall", seconds=100, times=FOREVER)
    processes.read_until(process, "waits for the data of ranks")
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=50)
    assert process.returncode == 1
    assert "stopped by SIGTERM while waiting for data" in output + errors, errors
    logs = output + "".join(path.read_text() for path in (tmp_path / "run" / "logs").glob("*/*"))
    assert "reading data.sources." in logs and ".parquet, for " in logs
    (saved,) = (tmp_path / "run" / "checkpoint").iterdir()
    assert json.loads((saved / "train_state.json").read_text())["step"] == len(hashes(tmp_path))


def test_stuck_data_workers_do_not_outlive_a_killed_trainer(hub, tmp_path):
    process = start(hub, tmp_path, *ENDLESS)
    processes.read_until(process, "step:  3")
    hub.fault("resolve", do="stall", seconds=100, times=FOREVER)
    time.sleep(1)
    (trainer,) = processes.descendants(process.pid)[:1]
    workers = processes.descendants(trainer)
    assert len(workers) == 2
    os.kill(trainer, signal.SIGKILL)
    process.kill()
    process.wait()
    processes.assert_gone(workers, seconds=5)


@pytest.mark.parametrize(
    ("overrides", "environment", "key", "hint"),
    [
        (["--data.sources.fineweb_edu.config", "sample-1BT"], {}, "fineweb_edu.config", "sample-10BT"),
        ([], {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE", "embedded:code"),
    ],
)
def test_a_mistake_about_the_hub_is_one_sentence_and_status_2(hub, tmp_path, overrides, environment, key, hint):
    status, output, errors = run(hub, tmp_path, *overrides, **environment)
    assert status == 2, output + errors
    assert "Traceback" not in output + errors and "total parameters" not in output
    [sentence] = errors.strip().splitlines()
    assert key in sentence and hint in sentence
