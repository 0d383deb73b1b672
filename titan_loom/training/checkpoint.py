"""Saving and loading checkpoints: tensors through DCP, everything else as JSON beside them.

A checkpoint is written under a hidden name and renamed when every rank has finished and the files are on disk, so it
exists completely or not at all. It can be read by any number of processes, which check every file first.
"""

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from titan_loom.config import job_config
from titan_loom.distributed.process_group import from_rank0, gather_objects
from titan_loom.errors import RunError
from titan_loom.optim.optimizers import Optimizers
from titan_loom.tools.logging import logger
from titan_loom.training import checkpoint_files
from titan_loom.training.dcp_reader import TensorReader
from titan_loom.training.dcp_writer import TensorWriter

OPTIMIZER = "optimizer."


class CheckpointManager:
    """Saves a model and its optimizers to `folder`, keeps the newest few, and loads them back.

    Args:
        folder: the run's checkpoint folder, on a file system that all ranks share.
        config: `[checkpoint]`.
    """

    def __init__(self, folder: Path, config: job_config.Checkpoint, model: nn.Module, optimizers: Optimizers):
        self.folder = folder
        self.config = config
        self.model = model
        self.optimizers = optimizers

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Save step `step` with `state`, plain data that JSON can hold. Called by all ranks together.

        Raises:
            RunError: on every rank, when any rank could not write; what was saved before is untouched.
        """
        path = self.folder / f"step-{step}"
        aside = self.folder / f".{path.name}.writing"
        try:
            from_rank0(make_empty, aside)
            writer = TensorWriter(aside)
            dcp.save(self._tensors(), storage_writer=writer)
            files = {name: file for files in gather_objects(writer.checksums) for name, file in files.items()}
            from_rank0(finish, aside, path, state | {"files": files})
        except (CheckpointException, OSError) as error:  # CheckpointException is not an Exception
            if dist.get_rank() == 0:
                shutil.rmtree(aside, ignore_errors=True)
            raise RunError(f"checkpoint {path} could not be written: {reason(error)}") from error
        logger.info(f"Saved checkpoint {path}")
        from_rank0(self._remove_old)

    def load(self, start: checkpoint_files.Start) -> None:
        """Fill the model, and unless `start.model_only` the optimizers, from a checkpoint of any number of ranks.

        Raises:
            UserError: on every rank, when a file is not what was written, or is no checkpoint of tensors.
        """
        if damage := next(filter(None, gather_objects(_damage(start))), None):
            raise checkpoint_files.damaged(start.path, damage, start.way_on)
        reader = TensorReader(start.path)
        tensors = self._model_tensors()
        try:
            if not start.model_only:
                shapes = from_rank0(_optimizer_shapes, reader)
                states = self.optimizers.prepare_states(shapes)
                tensors |= {OPTIMIZER + key: tensor for key, tensor in states.items()}
            with torch.no_grad():
                dcp.load(tensors, storage_reader=reader)
        except (CheckpointException, pickle.UnpicklingError, OSError) as error:
            raise checkpoint_files.damaged(start.path, reason(error), start.way_on) from error
        what = "weights only" if start.model_only else "weights and optimizers"
        logger.info(f"Loaded checkpoint {start.path} ({what})")

    def _model_tensors(self) -> dict[str, Tensor]:
        named = (*self.model.named_parameters(), *self.model.named_buffers())
        return {f"model.{name}": tensor.detach() for name, tensor in named}

    def _tensors(self) -> dict[str, Tensor]:
        return self._model_tensors() | {
            OPTIMIZER + key: tensor for key, tensor in self.optimizers.named_states().items()
        }

    def _remove_old(self) -> None:
        for step in checkpoint_files.outlived_steps(checkpoint_files.complete_steps(self.folder), self.config):
            checkpoint_files.remove(self.folder / f"step-{step}")


def make_empty(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)


def finish(aside: Path, path: Path, state: dict[str, Any]) -> None:
    """Complete the checkpoint in `aside` and give it its name, durably."""
    checkpoint_files.write_state(aside, state)
    _fsync_folder(aside)
    if path.exists():  # the same step again, after a resume from an older one
        checkpoint_files.remove(path)
    aside.rename(path)
    _fsync_folder(path.parent)


def _fsync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _damage(start: checkpoint_files.Start) -> str | None:
    """What is wrong with this rank's share of the checkpoint's files: each is read by one rank."""
    files = start.state["files"]
    share = sorted(files)[dist.get_rank() :: dist.get_world_size()]
    return next(filter(None, (checkpoint_files.find_damage(start.path / name, files[name]) for name in share)), None)


def _optimizer_shapes(reader: TensorReader) -> dict[str, torch.Size]:
    saved = reader.read_metadata().state_dict_metadata
    return {key.removeprefix(OPTIMIZER): entry.size for key, entry in saved.items() if key.startswith(OPTIMIZER)}


def reason(error: BaseException) -> str:
    """In one line, what was behind a failure; of a failure of several ranks, the first rank's."""
    if isinstance(error, CheckpointException):
        error, _ = error.failures[min(error.failures)]
    return str(error).splitlines()[0] if str(error) else type(error).__name__
