"""Runs a function in one or several processes that share a gloo process group, and returns what each returned.

The processes come from a fork server that has imported torch once, so that a test pays for its work and not for
imports. A process that fails brings its traceback; one that hangs is killed. Below: what tests of run_train.sh do with
the processes that it starts.
"""

import multiprocessing
import os
import signal
import subprocess
import time
import traceback
from multiprocessing.connection import wait
from pathlib import Path

import torch

TIMEOUT_SECONDS = 120

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["titan_loom.trainer", "torch._dynamo", "torch._inductor.pattern_matcher"])


def run(function, world_size: int = 1, *args) -> list:
    """Call `function(*args)` on `world_size` ranks; results in rank order."""
    # Here and not in rank 0, as under torchrun: another run of processes cannot take its port.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    receivers, processes = [], []
    for rank in range(world_size):
        receiver, sender = _context.Pipe(duplex=False)
        receivers.append(receiver)
        processes.append(_context.Process(target=_worker, args=(function, rank, world_size, store.port, sender, args)))
        processes[-1].start()
        sender.close()
    try:
        return _collect(receivers)
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


def _collect(receivers) -> list:
    """Results in rank order; raises with the traceback of the first rank that fails."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    results: dict[int, object] = {}
    while len(results) < len(receivers):
        waiting = [receiver for rank, receiver in enumerate(receivers) if rank not in results]
        ready = wait(waiting, timeout=max(0, deadline - time.monotonic()))
        assert ready, f"no result within {TIMEOUT_SECONDS} s, only from ranks {sorted(results)}"
        for receiver in ready:
            rank = receivers.index(receiver)
            try:
                failed, results[rank] = receiver.recv()
            except EOFError:
                raise AssertionError(f"rank {rank} died without a word") from None
            assert not failed, f"rank {rank} of {len(receivers)}:\n{results[rank]}"
    return [results[rank] for rank in range(len(receivers))]


def _worker(function, rank, world_size, port, sender, args):
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
        LOG_RANK="",
    )
    torch.set_num_threads(1)
    try:
        sender.send((False, function(*args)))
    except BaseException:
        sender.send((True, traceback.format_exc()))
        raise SystemExit(1) from None


def read_until(process: subprocess.Popen, text: str) -> None:
    """Read the output of `process` up to the first line with `text` in it."""
    assert any(text in line for line in process.stdout), f"the output ended without {text!r}"


def descendants(pid: int) -> list[int]:
    children = list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    return children + [descendant for child in children for descendant in descendants(child)]


def kill_tree(process: subprocess.Popen) -> None:
    for pid in (process.pid, *descendants(process.pid)):
        os.kill(pid, signal.SIGKILL)
    process.wait()


def assert_gone(pids: list[int], seconds: float) -> None:
    """Wait for `pids` to end, at most for `seconds`."""
    deadline = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "a process outlived the one that started it"
        time.sleep(0.05)
