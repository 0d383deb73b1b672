"""The process group: gloo on CPUs, gloo and NCCL on CUDA devices, one process or many by the same code."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from titan_loom.config.job_config import Comm


def local_device() -> torch.device:
    """The device of this process: its CUDA device when there is one, else the CPU."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def init_process_group(comm: Comm, device: torch.device) -> None:
    """Join the process group that the launcher describes in the environment; without a launcher, be its only member.

    CPU tensors are always communicated by gloo, so that counts and flags cost no device synchronisation.
    """
    kwargs = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        timeout=timedelta(seconds=comm.init_timeout_seconds),
        device_id=device if device.type == "cuda" else None,
        **kwargs,
    )


def sum_over_ranks(values: list[int]) -> list[int]:
    """Sum of host integers over all ranks, without touching the device."""
    tensor = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(tensor)
    return tensor.tolist()


def from_rank0(function, *args):
    """Call `function(*args)` on rank 0 only and return its result on every rank.

    What it raises on rank 0 is raised on every rank, so that nobody waits for a rank that has left.
    """
    outcome: list = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = function(*args)
        except Exception as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def tighten_timeout(comm: Comm, device: torch.device) -> None:
    """After the first step, expect collectives on CUDA devices to be prompt.

    gloo keeps the long timeout: it waits for the host, which may be writing a checkpoint.
    """
    if device.type == "cuda":
        backend = dist.group.WORLD._get_backend(device)
        backend._set_default_timeout(timedelta(seconds=comm.train_timeout_seconds))
