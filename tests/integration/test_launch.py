"""The launcher and the entry point with stand-in workers: statuses, output, signals, several hosts, torchrun."""

import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
LAUNCH = [sys.executable, "-m", "titan_loom.launch"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]

WORKER = """
import os, signal, sys, time
from pathlib import Path

rank, mode = int(os.environ["RANK"]), sys.argv[1]
print("out of rank", rank, "of", os.environ["WORLD_SIZE"], "terminal", sys.stdout.isatty())
if mode == "raise" and rank == 1:
    raise RuntimeError("boom")
if mode == "mistake" and rank == 1:
    print("error: a sentence", file=sys.stderr)
    sys.exit(2)
if mode == "die" and rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "signals":
    def receive(signum, frame):
        with open(f"signals{rank}", "a") as file:
            file.write(signal.Signals(signum).name + " ")
    signal.signal(signal.SIGTERM, receive)
    signal.signal(signal.SIGINT, receive)
    Path(f"ready{rank}").touch()
    while not Path(f"signals{rank}").exists():
        time.sleep(0.05)
    time.sleep(float(sys.argv[2]))
    Path(f"saved{rank}").touch()
    sys.exit(1)
if mode != "done":
    time.sleep(60)
"""

# The entry point with a trainer that needs no model.
TRAINER = """
import os, sys, types
from titan_loom.errors import Interrupted, RunError, UserError

class Trainer:
    def __init__(self, config):
        self.mode = config.job.description
    def train(self):
        print("training on rank", os.environ.get("RANK", "alone"))
        errors = {
            "mistake": UserError("a sentence"),
            "failed": RunError("a full disk"),
            "stopped": Interrupted("stopped by SIGTERM after step 3"),
        }
        if self.mode == "crash":
            raise RuntimeError("boom")
        if self.mode in errors:
            raise errors[self.mode]
    def close(self):
        print("closed")

sys.modules["titan_loom.trainer"] = types.SimpleNamespace(Trainer=Trainer)
from titan_loom.train import main
sys.exit(main())
"""

RUN = """
[data]
lanes = 2
[data.sources.prose]
path = "embedded:prose"
[training]
steps = 1
local_batch_size = 1
global_batch_size = 2
"""


@pytest.fixture
def start(tmp_path):
    """Starts a command in a folder that holds the stand-ins; ends it with the test."""
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "stand_in.py").write_text(TRAINER)
    (tmp_path / "run.toml").write_text(RUN)
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("RANK", "WORLD", "MASTER"))}
    processes = []

    def start(*command: str, **options) -> subprocess.Popen:
        environment = inherited | {"PYTHONPATH": str(REPOSITORY)} | options.pop("environment", {})
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        processes.append(subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, **pipes))
        return processes[-1]

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def run(start):
    def run(*command: str, **options) -> tuple[int, str, str]:
        process = start(*command, **options)
        output, errors = process.communicate(timeout=50)
        return process.returncode, output, errors

    return run


def wait_for(*files: Path) -> None:
    deadline = time.monotonic() + 30
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, f"{files} did not appear"
        time.sleep(0.05)


def log_of(folder: Path, name: str) -> Path:
    [file] = folder.glob(f"logs/*/{name}")
    return file


def test_rank_0_has_the_output_and_the_others_have_files(run, tmp_path):
    status, output, errors = run(*LAUNCH, "--nproc_per_node", "2", "-m", "worker", "done")
    assert (status, output, errors) == (0, "out of rank 0 of 2 terminal False\n", "")
    assert log_of(tmp_path, "rank1.out").read_text() == "out of rank 1 of 2 terminal False\n"
    assert log_of(tmp_path, "rank1.err").read_text() == ""


def test_log_rank_chooses_who_is_shown(run, tmp_path):
    command = [*LAUNCH, "--nproc_per_node", "2", "--log_dir", "elsewhere", "-m", "worker", "done"]
    _, output, _ = run(*command, environment={"LOG_RANK": "1"})
    assert output == "out of rank 1 of 2 terminal False\n"
    assert (tmp_path / "elsewhere" / "rank0.out").read_text() == "out of rank 0 of 2 terminal False\n"


def test_a_shown_rank_keeps_the_terminal(start):
    ours, theirs = pty.openpty()
    process = start(*LAUNCH, "-m", "worker", "done", stdout=theirs)
    assert process.wait(timeout=50) == 0
    os.close(theirs)
    assert b"out of rank 0 of 1 terminal True" in os.read(ours, 1000)
    os.close(ours)


def test_a_worker_that_raises_is_status_1_and_one_line(run, tmp_path):
    status, _, errors = run(*LAUNCH, "--nproc_per_node", "2", "-m", "worker", "raise")
    assert status == 1
    log = log_of(tmp_path, "rank1.err")
    assert errors == f"error: rank 1 ended with exit status 1; its output is in {log.relative_to(tmp_path)}\n"
    assert "RuntimeError: boom" in log_of(tmp_path, "rank1.err").read_text()


def test_a_worker_that_is_killed_is_status_1_and_one_line(run):
    status, _, errors = run(*LAUNCH, "--nproc_per_node", "2", "-m", "worker", "die")
    assert (status, errors) == (1, "error: rank 0 ended with signal SIGKILL\n")


def test_a_mistake_that_a_hidden_rank_met_is_status_2_and_shown(run):
    status, _, errors = run(*LAUNCH, "--nproc_per_node", "2", "-m", "worker", "mistake")
    assert (status, errors) == (2, "error: a sentence\n")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_reaches_every_worker_once_and_the_launcher_waits_until_they_saved(start, tmp_path, name):
    process = start(*LAUNCH, "--nproc_per_node", "2", "-m", "worker", "signals", "0.5")
    wait_for(tmp_path / "ready0", tmp_path / "ready1")
    process.send_signal(getattr(signal, name))
    wait_for(tmp_path / "signals0", tmp_path / "signals1")
    process.send_signal(signal.SIGTERM)  # schedulers repeat themselves
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (1, f"stopped by {name}\n")
    for rank in range(2):
        assert (tmp_path / f"saved{rank}").exists()
        assert (tmp_path / f"signals{rank}").read_text().split() == ["SIGINT" if name == "SIGINT" else "SIGTERM"]


def test_a_second_interrupt_kills_at_once(start, tmp_path):
    process = start(*LAUNCH, "--nproc_per_node", "2", "-m", "worker", "signals", "60")
    wait_for(tmp_path / "ready0", tmp_path / "ready1")
    process.send_signal(signal.SIGINT)
    wait_for(tmp_path / "signals0", tmp_path / "signals1")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 1
    assert not (tmp_path / "saved0").exists()


def test_two_launchers_are_two_nodes(start, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--nnodes", "2", "--nproc_per_node", "2", "--master_addr", "127.0.0.1", "--master_port", str(port)]
    nodes = [start(*LAUNCH, *options, "--node_rank", str(node), "-m", "worker", "done") for node in (1, 0)]
    results = [(*node.communicate(timeout=50), node.returncode) for node in nodes]
    assert results == [(f"out of rank {rank} of 4 terminal False\n", "", 0) for rank in (2, 0)]
    assert sorted(file.name for file in (tmp_path / "logs").glob("*/*.out")) == ["rank1.out", "rank3.out"]


def test_a_port_that_is_taken_is_one_line(run):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        options = ["--nnodes", "2", "--master_addr", "127.0.0.1", "--master_port", port]
        status, _, errors = run(*LAUNCH, *options, "-m", "worker", "done")
    assert status == 1
    assert f"error: no rendezvous at 127.0.0.1:{port}: " in errors and "Traceback" not in errors


def test_a_users_mistake_starts_no_worker(run, tmp_path):
    command = ["--nproc_per_node", "2", "-m", "titan_loom.train", "--job.config_file", "run.toml", "--data.lanes", "3"]
    status, output, errors = run(*LAUNCH, *command)
    assert (status, output) == (2, "")
    assert errors.startswith("error: data.lanes is 3; ") and errors.count("\n") == 1
    assert not (tmp_path / "outputs").exists()


STAND_IN = ["-m", "stand_in", "--job.config_file", "run.toml", "--job.description"]


@pytest.mark.parametrize(
    ("mode", "status", "errors"),
    [
        ("done", 0, ""),
        ("mistake", 2, "error: a sentence\n"),
        ("failed", 1, "error: a full disk\n"),
        ("stopped", 1, "stopped by SIGTERM after step 3\n"),
    ],
)
def test_the_entry_point_turns_what_the_trainer_raises_into_a_status(run, mode, status, errors):
    assert run(sys.executable, *STAND_IN, mode) == (status, "training on rank alone\nclosed\n", errors)


def test_the_launcher_returns_the_status_of_the_entry_point(run):
    status, _, errors = run(*LAUNCH, "--nproc_per_node", "2", *STAND_IN, "mistake")
    assert (status, errors) == (2, "error: a sentence\n")


def test_a_crash_of_the_trainer_keeps_its_traceback(run):
    status, _, errors = run(sys.executable, *STAND_IN, "crash")
    assert status == 1
    assert "RuntimeError: boom" in errors


def test_torchrun_works_as_well_and_says_a_mistake_once(run):
    command = [*TORCHRUN, "--nproc_per_node", "2", "--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
    status, output, _ = run(*command, *STAND_IN, "done")
    assert status == 0
    assert {"training on rank 0", "training on rank 1"} <= set(output.splitlines())

    status, output, errors = run(*command, *STAND_IN, "mistake", "--training.stepz", "3")
    assert status == 1
    assert "training on" not in output
    assert errors.count("error: training.stepz is not a key; the nearest one is training.steps\n") == 1


def test_run_train_looks_for_the_file_in_the_callers_folder_then_in_the_repository(run, tmp_path):
    script = str(REPOSITORY / "run_train.sh")
    wrong = ["--training.stepz", "3"]
    assert run(script, *wrong)[2] == "error: training.stepz is not a key; the nearest one is training.steps\n"
    (tmp_path / "train_configs").mkdir()
    (tmp_path / "train_configs" / "debug.toml").write_text("[callers]\nkey = 1\n")
    assert "callers.key is not a key" in run(script)[2]
    status, _, errors = run(script, environment={"CONFIG_FILE": "nowhere.toml"})
    assert status == 2
    assert errors == "error: job.config_file is 'nowhere.toml', which cannot be read: No such file or directory\n"


@pytest.mark.parametrize(
    ("environment", "options"),
    [
        ({}, "--nnodes 1 --node_rank 0"),
        ({"NGPU": "3"}, "--nproc_per_node 3 --nnodes 1 --node_rank 0"),
        ({"NGPU": "2", "NNODES": "2", "NODE_RANK": "1"}, "--nproc_per_node 2 --nnodes 2 --node_rank 1"),
        ({"NGPU": "2", "WORLD_SIZE": "3", "RANK": "2"}, "--nproc_per_node 2 --nnodes 3 --node_rank 2"),
        ({"NGPU": "2", "WORLD_SIZE": "3"}, "--nproc_per_node 2 --nnodes 1 --node_rank 0"),
    ],
)
def test_run_train_reads_nodes_and_processes_from_the_environment(run, tmp_path, environment, options):
    (tmp_path / "python3").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "python3").chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    _, command, _ = run(str(REPOSITORY / "run_train.sh"), environment=environment | path)
    assert " ".join(re.findall(r"--n\w+ \d+", command)) == options
