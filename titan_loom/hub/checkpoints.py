"""Checkpoints without a process group: found, read into tensors and written by one process."""

import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from titan_loom.errors import UserError
from titan_loom.training import checkpoint_files
from titan_loom.training.checkpoint import finish, make_empty, reason
from titan_loom.training.dcp_reader import TensorReader
from titan_loom.training.dcp_writer import TensorWriter

WAY_ON = "choose another checkpoint"


def find_checkpoint(path: Path) -> Path:
    """The checkpoint at `path`: a `step-N` folder, or the newest one of a run's or a checkpoint folder.

    Raises UserError when there is none.
    """
    if checkpoint_files.is_complete(path):
        return path
    for folder in (path, path / "checkpoint"):
        if steps := checkpoint_files.complete_steps(folder):
            return folder / f"step-{steps[-1]}"
    raise UserError(f"{path} is no complete checkpoint and holds none")


def read_tensors(path: Path, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Fill `tensors`, by their names in the checkpoint, on the CPU; what was saved in another dtype is cast.

    Raises UserError when a file is not what was written, or does not hold them.
    """
    for name, expected in state["files"].items():
        if damage := checkpoint_files.find_damage(path / name, expected):
            raise checkpoint_files.damaged(path, damage, WAY_ON)
    try:
        with torch.no_grad(), _single_process():
            dcp.load(tensors, storage_reader=TensorReader(path), no_dist=True)
    except (CheckpointException, pickle.UnpicklingError, OSError) as error:
        raise checkpoint_files.damaged(path, reason(error), WAY_ON) from error


def write_checkpoint(path: Path, state: dict[str, Any], tensors: dict[str, Tensor], others: dict[str, bytes]) -> None:
    """Write a checkpoint of `tensors` and `state`, and `others`, files by name, completely or not at all."""
    aside = path.with_name(f".{path.name}.writing")
    make_empty(aside)
    writer = TensorWriter(aside)
    with _single_process():
        dcp.save(tensors, storage_writer=writer, no_dist=True)
    for name, contents in others.items():
        (aside / name).write_bytes(contents)
        writer.checksums[name] = checkpoint_files.checksum(aside / name)
    finish(aside, path, state | {"files": writer.checksums})


@contextmanager
def _single_process() -> Iterator[None]:
    """Without DCP's warning that it is what was asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield
