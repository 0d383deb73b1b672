"""Checkpoint folders on disk, without torch: which are complete, which one a start continues from, what they say.

A checkpoint is a folder `step-N` with DCP's `.metadata` (tensors) and `train_state.json` (everything else). It is
written under another name and renamed when it is whole, so a folder of that name is a checkpoint that can be loaded.
"""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_loom.config import JobConfig, Training
from titan_loom.errors import UserError

STATE_FILE = "train_state.json"
STEP_FOLDER = re.compile(r"step-(\d+)")


def checkpoint_folder(config: JobConfig) -> Path:
    return Path(config.job.dump_folder or ".") / config.checkpoint.folder


def is_complete(path: Path) -> bool:
    return (path / ".metadata").is_file() and (path / STATE_FILE).is_file()


def complete_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in `folder`, ascending."""
    if not folder.is_dir():
        return []
    matches = [(STEP_FOLDER.fullmatch(path.name), path) for path in folder.iterdir()]
    return sorted(int(match[1]) for match, path in matches if match and is_complete(path))


def read_state(path: Path) -> dict[str, Any]:
    """What `train_state.json` of the checkpoint at `path` holds. Raises UserError when it cannot be read."""
    try:
        return json.loads((path / STATE_FILE).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"checkpoint {path} has no readable {STATE_FILE}: {error}") from error


def finished_step(config: JobConfig) -> int | None:
    """The step at which the run of `config` ended, when there is nothing left to train; else None."""
    checkpoint = config.checkpoint
    steps = complete_steps(checkpoint_folder(config)) if checkpoint.resume and checkpoint.load_step == -1 else []
    return steps[-1] if steps and steps[-1] >= config.training.num_steps else None


def remove(path: Path) -> None:
    """Delete a checkpoint so that it is never seen half deleted."""
    doomed = path.with_name(f".{path.name}.deleted")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed)


def remove_leftovers(folder: Path) -> None:
    """Delete what interrupted saves and deletions left in `folder`."""
    for path in folder.glob(".step-*"):
        shutil.rmtree(path)


def set_aside_after(folder: Path, step: int) -> list[Path]:
    """Rename the checkpoints after `step`, so that a run that goes on from `step` cannot mix with what came after it.

    Returns their new names; nothing is deleted.
    """
    renamed = []
    for later in (later for later in complete_steps(folder) if later > step):
        count = len(list(folder.glob(f"step-{later}.superseded-*")))
        renamed.append((folder / f"step-{later}").rename(folder / f"step-{later}.superseded-{count + 1}"))
    return renamed


@dataclass(frozen=True)
class Start:
    """Where a run starts from."""

    path: Path
    state: dict[str, Any]
    model_only: bool
    """Take only the weights: a new run that begins at step 0."""


def find_start(
    config: JobConfig, model_args: dict[str, Any], data_fingerprint: dict[str, Any] | None = None
) -> Start | None:
    """Decide what a start with `config` continues from; None means from random weights.

    Args:
        model_args: the fields of the model's arguments, as `dataclasses.asdict` gives them.
        data_fingerprint: what defines the order of the data, by configuration key; None leaves that to a later
            `check_same_data`.

    Raises:
        UserError: the checkpoint that was asked for is not there, belongs to another model or other data, or ends with
            a step that was cut, after which the run cannot go on.
    """
    checkpoint, folder = config.checkpoint, checkpoint_folder(config)
    steps = complete_steps(folder)
    if not checkpoint.resume:
        if steps and not config.job.overwrite:
            raise UserError(
                f"checkpoint.resume is false but {folder} holds step {steps[-1]}: choose another job.dump_folder, or "
                "set job.overwrite to delete what is there"
            )
        steps = []
    if checkpoint.load_step != -1 and checkpoint.load_step not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise UserError(f"checkpoint.load_step is {checkpoint.load_step} but the steps in {folder} are: {there}")
    if steps:
        step = steps[-1] if checkpoint.load_step == -1 else checkpoint.load_step
        start = Start(folder / f"step-{step}", read_state(folder / f"step-{step}"), model_only=False)
    elif checkpoint.initial_load_path is not None:
        path = Path(checkpoint.initial_load_path)
        if not is_complete(path):
            raise UserError(
                f"checkpoint.initial_load_path is {str(path)!r}, which is not a complete checkpoint (a `step-N` "
                f"folder with .metadata and {STATE_FILE})"
            )
        start = Start(path, read_state(path), model_only=checkpoint.initial_load_model_only)
    else:
        return None
    _check_same_model(start, config.model.name, model_args)
    _check_extendable(start, config.training)
    if data_fingerprint is not None:
        check_same_data(start, data_fingerprint)
    return start


def _check_same_model(start: Start, name: str, model_args: dict[str, Any]) -> None:
    saved = start.state["model"]
    if saved["name"] != name:
        raise UserError(f"model.name is {name!r} but checkpoint {start.path} holds a {saved['name']!r}")
    for key, found, wanted in _differences(saved["args"], json.loads(json.dumps(model_args))):
        raise UserError(
            f"checkpoint {start.path} holds another model: model.args.{key} is {wanted} here and {found} there"
        )


def _check_extendable(start: Start, training: Training) -> None:
    """A step that was cut to meet `total_tokens` comes last: data and schedules count all others as full."""
    if start.model_only:
        return
    data, seen = start.state["data"], start.state["tokens_seen"]
    full = start.state["step"] * data["training.global_batch_size"] * data["training.seq_len"]
    wanted = training.total_tokens or training.num_steps * training.tokens_per_step
    if seen != full and wanted > seen:
        raise UserError(
            f"training.total_tokens or training.steps ask for {wanted:,} tokens, but the last step of checkpoint "
            f"{start.path} was cut to end at {seen:,}, after which no run can go on exactly: start a new run from the "
            "weights with checkpoint.initial_load_path, in another job.dump_folder"
        )


def check_same_data(start: Start | None, fingerprint: dict[str, Any]) -> None:
    """Raises UserError when `start` continues a run with another order of the data than `fingerprint` says."""
    if start is None or start.model_only:
        return
    for key, found, wanted in _differences(start.state["data"], fingerprint):
        raise UserError(
            f"{key} is {wanted} but checkpoint {start.path} was made with {found}, and the order of the data depends "
            "on it: restore the value, or start a new run from the weights with checkpoint.initial_load_path"
        )


def _differences(found: dict[str, Any], wanted: dict[str, Any]):
    for key in wanted | found:
        if found.get(key) != wanted.get(key):
            yield key, found.get(key), wanted.get(key)
