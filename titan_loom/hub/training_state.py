"""A checkpoint without pickles, as it lies on the Hub: tensors as safetensors, everything else as JSON. It does not say
where its machine kept files.

DCP's own files describe themselves by a pickle, which nobody should load from elsewhere.
"""

import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from titan_loom.hub.checkpoints import WAY_ON, read_tensors, write_checkpoint
from titan_loom.training import checkpoint_files
from titan_loom.training.dcp_reader import TensorReader

FOLDER = "training_state"
MAX_FILE_BYTES = 4 << 30
"""Tensors are kept in files of this size, one tensor's at least, of which one is in memory at a time."""


def write(checkpoint: Path, folder: Path) -> None:
    """Write the state of `checkpoint` to `folder`. Raises UserError when the checkpoint is damaged."""
    folder.mkdir()
    state = checkpoint_files.read_state(checkpoint, WAY_ON)
    files = {}
    for i, shapes in enumerate(_by_file(checkpoint)):
        tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in shapes.items()}
        read_tensors(checkpoint, state, tensors)
        state["files"] = {}  # they are whole, as was found once
        name = f"tensors-{i:05d}.safetensors"
        save_file(tensors, folder / name)
        files[name] = checkpoint_files.checksum(folder / name)
    places = {key: checkpoint_files.without_places(state[key]) for key in ("config", "data")}
    checkpoint_files.write_state(folder, state | places | {"files": files})


def read(folder: Path, checkpoint: Path, way_on: str) -> None:
    """Make the checkpoint `checkpoint` of the state in `folder`, completely or not at all.

    Raises UserError, which ends in `way_on`, when a file is not what was written.
    """
    state: dict[str, Any] = checkpoint_files.read_state(folder, way_on)
    tensors = {}
    for name, expected in state.pop("files").items():
        path = folder / Path(name).name
        if damage := checkpoint_files.find_damage(path, expected):
            raise checkpoint_files.damaged(folder, damage, way_on)
        try:
            with safe_open(path, framework="pt") as file:
                tensors |= {key: file.get_tensor(key) for key in file.offset_keys()}  # mapped, not read
        except SafetensorError as error:
            raise checkpoint_files.damaged(folder, f"{name} cannot be read: {error}", way_on) from error
    write_checkpoint(checkpoint, state, tensors, {})


def _by_file(checkpoint: Path) -> list[dict[str, Any]]:
    """What DCP says of the tensors, for each file that they are written to."""
    files: list[dict[str, Any]] = []
    size = math.inf
    for name, entry in TensorReader(checkpoint).read_metadata().state_dict_metadata.items():
        num_bytes = entry.size.numel() * entry.properties.dtype.itemsize
        if size + num_bytes > MAX_FILE_BYTES:
            files.append({})
            size = 0
        files[-1][name] = entry
        size += num_bytes
    return files
