"""Saving and loading checkpoints: tensors through DCP, everything else as JSON beside them.

A checkpoint is written under a hidden name and renamed when every rank has finished and the files are on disk, so it
exists completely or not at all. It can be read by any number of processes.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from titan_loom.config import job_config
from titan_loom.distributed.process_group import from_rank0
from titan_loom.optim.optimizers import Optimizers
from titan_loom.tools.logging import logger
from titan_loom.training import checkpoint_files
from titan_loom.training.dcp_reader import TensorReader


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
            RuntimeError: on every rank, when any rank could not write; what was saved before is untouched.
        """
        path = self.folder / f"step-{step}"
        aside = self.folder / f".{path.name}.writing"
        from_rank0(_make_empty, aside)
        try:
            dcp.save(self._tensors(), storage_writer=dcp.FileSystemWriter(aside, sync_files=True))
            from_rank0(_finish, aside, path, state)
        except (CheckpointException, OSError) as error:  # CheckpointException is not an Exception
            if dist.get_rank() == 0:
                shutil.rmtree(aside, ignore_errors=True)
            raise RuntimeError(f"checkpoint {path} could not be written: {error}") from error
        logger.info(f"Saved checkpoint {path}")
        from_rank0(self._remove_old)

    def load(self, start: checkpoint_files.Start) -> None:
        """Fill the model, and unless `start.model_only` the optimizers, from a checkpoint of any number of ranks."""
        reader = TensorReader(start.path)
        tensors = {f"model.{name}": parameter for name, parameter in self.model.named_parameters()}
        if not start.model_only:
            saved = reader.read_metadata().state_dict_metadata
            prefix = "optimizer."
            shapes = {key.removeprefix(prefix): entry.size for key, entry in saved.items() if key.startswith(prefix)}
            tensors |= {prefix + key: tensor for key, tensor in self.optimizers.prepare_states(shapes).items()}
        with torch.no_grad():
            dcp.load(tensors, storage_reader=reader)
        what = "weights only" if start.model_only else "weights and optimizers"
        logger.info(f"Loaded checkpoint {start.path} ({what})")

    def _tensors(self) -> dict[str, Tensor]:
        model = {f"model.{name}": parameter.detach() for name, parameter in self.model.named_parameters()}
        return model | {f"optimizer.{key}": tensor for key, tensor in self.optimizers.named_states().items()}

    def _remove_old(self) -> None:
        if self.config.keep_latest_k:
            for step in checkpoint_files.complete_steps(self.folder)[: -self.config.keep_latest_k]:
                checkpoint_files.remove(self.folder / f"step-{step}")


def _make_empty(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)


def _finish(aside: Path, path: Path, state: dict[str, Any]) -> None:
    """Complete the checkpoint in `aside` and give it its name, durably."""
    with open(aside / checkpoint_files.STATE_FILE, "w") as file:
        json.dump(state, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
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
