"""The process group: gloo on CPUs, gloo and NCCL on CUDA devices, one process or many by the same code."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_loom.config.decoding import leaves
from titan_loom.config.job_config import Comm
from titan_loom.errors import RunError, UserError


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


def sum_in_rank_order(values: Tensor) -> Tensor:
    """Sum over ranks in fp64 on the CPU; independent of the collective's own order of addition."""
    local = values.double().cpu()
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, local)
    return torch.stack(gathered).sum(0)


def check_same_on_all_ranks(config: dict[str, Any]) -> None:
    """Raises UserError on every rank when a key of the nested table `config` has another value on another rank."""
    mine, *others = (dict(leaves(table)) for table in gather_objects(config))
    for rank, theirs in enumerate(others, start=1):
        for key in mine | theirs:
            if mine.get(key) != theirs.get(key):
                raise UserError(
                    f"{key} is {mine.get(key)} on rank 0 and {theirs.get(key)} on rank {rank}; all processes of a run "
                    "need the same configuration"
                )


def ranks_where(condition: bool) -> list[int]:
    """The ranks on which `condition` holds."""
    return [rank for rank, holds in enumerate(gather_objects(condition)) if holds]


def first_error(error: Exception | None) -> Exception:
    """What to raise on every rank when at least one has an error: its own here, elsewhere the first rank's."""
    portable = error if isinstance(error, UserError | RunError) else error and RuntimeError(repr(error))
    errors = gather_objects(portable)
    return error or next(error for error in errors if error is not None)


def gather_objects(value: Any) -> list[Any]:
    """Every rank's `value`, plain data, on every rank."""
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def from_rank0(function, *args):
    """Call `function(*args)` on rank 0 only and return its result on every rank, however long it takes.

    What it raises on rank 0 is raised on every rank, so that nobody waits for a rank that has left.
    """
    outcome: list = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = function(*args)
        except Exception as error:
            outcome[1] = error
    with _patience():
        dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


@contextmanager
def _patience() -> Iterator[None]:
    """Within, collectives on the CPU do not time out: rank 0 may be downloading. One that dies is noticed without."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    timeout = backend.options._timeout
    backend._set_default_timeout(timedelta(days=365))
    try:
        yield
    finally:
        backend._set_default_timeout(timeout)


def tighten_timeout(comm: Comm, device: torch.device) -> None:
    """After the first step, expect collectives on CUDA devices to be prompt.

    gloo keeps the long timeout: it waits for the host, which may be writing a checkpoint.
    """
    if device.type == "cuda":
        backend = dist.group.WORLD._get_backend(device)
        backend._set_default_timeout(timedelta(seconds=comm.train_timeout_seconds))
