import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from titan_loom import launch, train
from titan_loom.distributed import elastic
from titan_loom.errors import UserError

WORKER = ["-m", "worker"]


@pytest.fixture
def devices(monkeypatch):
    """Pretends that the host has a number of CUDA devices."""
    return lambda count: monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(("count", "expected"), [(0, 1), (4, 4)])
def test_the_default_is_a_process_for_every_cuda_device_or_one(devices, count, expected):
    devices(count)
    assert elastic.parse_options(WORKER).nproc_per_node == expected


def test_one_host_rendezvouses_with_itself_on_a_free_port():
    options = elastic.parse_options(["--node_rank", "1", "--master_port", "1234", *WORKER])
    assert (options.rdzv_backend, options.rdzv_endpoint, options.local_addr) == ("c10d", "localhost:0", "localhost")
    assert options.rdzv_id != elastic.parse_options(WORKER).rdzv_id


def test_several_hosts_meet_at_the_master():
    argv = ["--nnodes", "2", "--node_rank", "1", "--master_addr", "host", "--master_port", "1234", *WORKER]
    options = elastic.parse_options(argv)
    assert (options.rdzv_backend, options.rdzv_endpoint) == ("static", "")
    assert (options.nnodes, options.node_rank, options.master_addr, options.master_port) == (2, 1, "host", 1234)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--nnodes", "two"], "--nnodes (NNODES) is 'two'; it must be a number of hosts, 1 or greater"),
        (["--nnodes", "0"], "--nnodes (NNODES) is '0'; it must be a number of hosts, 1 or greater"),
        (["--nnodes", "1:2"], "--nnodes (NNODES) is '1:2'; it must be a number of hosts, 1 or greater"),
        (["--nproc_per_node", "0"], "--nproc_per_node (NGPU) is 0; it must be 1 or greater"),
        (["--nproc_per_node", "x"], "--nproc_per_node (NGPU) is 'x': Unsupported nproc_per_node value: x"),
        (
            ["--nnodes", "2", "--node_rank", "2"],
            "--node_rank (NODE_RANK) is 2; it must be from 0 to 1, as --nnodes (NNODES) is 2",
        ),
        (
            ["--local_ranks_filter", "0,a"],
            "--local_ranks_filter (LOG_RANK) is '0,a'; it must be comma separated ranks",
        ),
    ],
)
def test_impossible_options_are_one_sentence(devices, argv, sentence):
    devices(0)
    with pytest.raises(UserError) as error:
        elastic.parse_options([*argv, *WORKER])
    assert str(error.value) == sentence


def test_more_processes_than_cuda_devices_are_refused(devices):
    devices(2)
    with pytest.raises(UserError, match=r"is 3; it must be from 1 to the 2 CUDA devices of this host"):
        elastic.parse_options(["--nproc_per_node", "3", *WORKER])


def test_shown_ranks_inherit_the_terminal_and_the_others_have_files_of_their_global_rank(tmp_path):
    logs = elastic.RankLogs(tmp_path / "logs", shown={0})
    destination = logs.reify({0: {"RANK": "2"}, 1: {"RANK": "3"}})
    assert destination.stdouts == {0: "", 1: str(tmp_path / "logs" / "rank3.out")}
    assert destination.stderrs == {0: "", 1: str(tmp_path / "logs" / "rank3.err")}
    assert logs.files == {3: tmp_path / "logs" / "rank3.err"}


def test_no_folder_is_made_when_every_rank_is_shown(tmp_path):
    elastic.RankLogs(tmp_path / "logs", shown={0}).reify({0: {"RANK": "0"}})
    assert not (tmp_path / "logs").exists()


def failure(exitcode: int, timestamp: int) -> ProcessFailure:
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=exitcode, error_file=os.devnull)
    failure.timestamp = timestamp
    return failure


@pytest.mark.parametrize(
    ("failures", "status", "sentence"),
    [
        ({0: failure(-15, 5), 1: failure(1, 4)}, 1, "rank 1 ended with exit status 1; its output is in rank1.err"),
        ({1: failure(1, 4), 0: failure(-15, 4)}, 1, "rank 1 ended with exit status 1; its output is in rank1.err"),
        ({0: failure(-9, 4)}, 1, "error: rank 0 ended with signal SIGKILL\n"),
        ({0: failure(2, 4), 1: failure(-15, 4)}, 2, ""),
        ({0: failure(1, 4), 1: failure(-15, 5)}, 1, ""),
    ],
)
def test_the_first_failure_is_the_one_that_counts(capsys, failures, status, sentence):
    assert elastic._report(failures, {1: Path("rank1.err")}) == status
    errors = capsys.readouterr().err
    assert sentence in errors and bool(sentence) == bool(errors)


def test_a_mistake_that_only_a_hidden_rank_met_is_shown(tmp_path, capsys):
    (tmp_path / "rank1.err").write_text("line\n" * 50 + "error: a sentence\n")
    assert elastic._report({1: failure(2, 4)}, {1: tmp_path / "rank1.err"}) == 2
    assert capsys.readouterr().err == "line\n" * (elastic.LINES_OF_LOG - 1) + "error: a sentence\n"


@pytest.fixture
def no_worker(monkeypatch):
    def run_workers(*_):
        raise AssertionError("a worker was started")

    monkeypatch.setattr(elastic, "run_workers", run_workers)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--training.stepz", "3"], "training.stepz is not a key; the nearest one is training.steps"),
        (["--job.config_file", "none.toml"], "cannot be read"),
        (["--training.steps", "3"], "data.sources is empty"),
    ],
)
def test_a_mistake_in_the_configuration_is_found_before_any_worker_starts(no_worker, capsys, argv, sentence):
    assert launch.main(["-m", "titan_loom.train", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert sentence in captured.err


@pytest.mark.parametrize(("processes", "threads"), [("2", "4"), ("3", "2"), ("16", "1")])
def test_processes_share_the_cores_of_the_host(monkeypatch, devices, processes, threads):
    devices(0)
    monkeypatch.setenv("OMP_NUM_THREADS", "")  # so that its absence is undone as well
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(elastic, "run_workers", lambda *_: 0)
    assert launch.main(["--nproc_per_node", processes, *WORKER]) == 0
    assert os.environ["OMP_NUM_THREADS"] == threads


def test_the_configuration_is_checked_for_the_processes_of_all_hosts(no_worker, capsys):
    options = ["--nproc_per_node", "3", "--nnodes", "2", "--master_port", "1", "-m", "titan_loom.train"]
    assert launch.main([*options, "--training.steps", "1", "--parallelism.expected_world_size", "7"]) == 2
    assert "expected_world_size is 7; this run has 6 processes" in capsys.readouterr().err


def test_a_wrong_key_is_reported_without_torch():
    code = """
import sys
from titan_loom import launch, train
assert launch.main(["--nproc_per_node", "2", "-m", "titan_loom.train", "--training.stepz", "3"]) == 2
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


STORE_THAT_GOES_AWAY = """
import os, time
from datetime import timedelta
from titan_loom import launch, train

os.environ.pop("TORCH_CPP_LOG_LEVEL", None)
launch._import_elastic()
assert "TORCH_CPP_LOG_LEVEL" not in os.environ  # workers keep their warnings
from torch.distributed import DistError, TCPStore

reader, writer = os.pipe()
if os.fork() == 0:
    client = TCPStore("127.0.0.1", int(os.read(reader, 9)), None, False)
    try:
        client.wait(["never"], timedelta(seconds=20))
    except DistError:
        os._exit(3)
server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
os.write(writer, str(server.port).encode())
time.sleep(1)
del server
assert os.waitstatus_to_exitcode(os.wait()[1]) == 3
"""


def test_a_host_that_leaves_first_is_no_stack_trace_for_the_others():
    result = subprocess.run([sys.executable, "-c", STORE_THAT_GOES_AWAY], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_help_after_the_module_explains_the_configuration(no_worker, capsys):
    with pytest.raises(SystemExit) as leaving:
        launch.main(["--nproc_per_node", "2", "-m", "titan_loom.train", "--help"])
    assert leaving.value.code == 0
    assert "--training.seq_len" in capsys.readouterr().out


@pytest.mark.parametrize("entry", ["launcher", "worker"])
def test_a_fake_run_starts_no_worker_and_reads_no_data(no_worker, devices, monkeypatch, tmp_path, entry):
    (tmp_path / "run.toml").write_text(
        """
        [model]
        tokenizer_path = "nowhere"
        [data]
        lanes = 64
        [data.sources.hub]
        path = "owner/there-is-no-such-dataset"
        [training]
        local_batch_size = 1
        global_batch_size = 64
        steps = 1
        """
    )
    planned = []
    monkeypatch.setattr("titan_loom.plan.main", lambda config, world_size: planned.append(world_size))
    devices(2)
    argv = ["-m", "titan_loom.train", "--job.config_file", str(tmp_path / "run.toml"), "--comm.mode", "fake"]
    if entry == "launcher":
        assert launch.main(["--nproc_per_node", "32", "--nnodes", "2", *argv]) == 0
    else:
        monkeypatch.setenv("WORLD_SIZE", "64")
        monkeypatch.setattr(sys, "argv", argv[1:])
        monkeypatch.setattr(train, "leave_with_launcher", lambda: None)
        assert train.main() == 0
    assert planned == [64]
    assert launch.main(["--nproc_per_node", "48", *argv]) == 2
