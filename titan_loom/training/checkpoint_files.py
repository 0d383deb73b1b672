"""Checkpoint folders on disk, without torch: which are complete, which one a start continues from, what they say.

A checkpoint is a folder `step-N` with DCP's `.metadata` (tensors) and `train_state.json` (everything else). It is
written under another name and renamed when it is whole. What a disk does to it later is found by checksums: those of
all files are in `train_state.json`, which begins with its own.
"""

import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_loom.config import Checkpoint, JobConfig, Training
from titan_loom.errors import UserError

STATE_FILE = "train_state.json"
STEP_FOLDER = re.compile(r"step-(0|[1-9][0-9]*)")


def checkpoint_folder(config: JobConfig) -> Path:
    return Path(config.job.dump_folder or ".") / config.checkpoint.folder


def is_complete(path: Path) -> bool:
    return (path / ".metadata").is_file() and (path / STATE_FILE).is_file()


def complete_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in `folder`, ascending."""
    return sorted(int(path.name.removeprefix("step-")) for path in _step_folders(folder) if is_complete(path))


def incomplete_steps(folder: Path) -> list[Path]:
    """What is called like a checkpoint in `folder` and lacks its tensors or its state."""
    return sorted(path for path in _step_folders(folder) if not is_complete(path))


def _step_folders(folder: Path) -> list[Path]:
    return [path for path in folder.glob("step-*") if STEP_FOLDER.fullmatch(path.name)]


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write `state`, plain data, to `train_state.json` of the checkpoint at `path`, durably and with its checksum."""
    with open(path / STATE_FILE, "w") as file:
        json.dump({"sha256": _state_sha256(state), **state}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_state(path: Path, way_on: str) -> dict[str, Any]:
    """What `write_state` wrote to the checkpoint at `path`.

    Raises UserError, which ends in `way_on`, when that is not what is there, or when a `step-N` is of another step.
    """
    try:
        state = json.loads((path / STATE_FILE).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, f"{STATE_FILE} cannot be read: {error}", way_on) from error
    if not isinstance(state, dict) or state.pop("sha256", None) != _state_sha256(state):
        raise damaged(path, f"{STATE_FILE} is not as it was written", way_on)
    if path.name != f"step-{state['step']}" and STEP_FOLDER.fullmatch(path.name):
        raise damaged(path, f"{STATE_FILE} is of step {state['step']}", way_on)
    return state


def _state_sha256(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()


def without_places(value: Any) -> Any:
    """`value`, plain data, with the names alone of paths that lead from the root, a home or a parent folder."""
    if isinstance(value, dict):
        return {key: without_places(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_places(inner) for inner in value]
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "~", "..")) else value


def checksum(path: Path) -> dict[str, int | str]:
    """Size and sha256 of a file, as `train_state.json` keeps them."""
    with open(path, "rb") as file:
        return {"size": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def find_damage(path: Path, expected: dict[str, int | str]) -> str | None:
    """What is wrong with the file at `path`, whose checksum was `expected`; None when nothing is."""
    try:
        size = path.stat().st_size
        if size != expected["size"]:
            return f"{path.name} has {size} bytes instead of {expected['size']}"
        return None if checksum(path) == expected else f"{path.name} has other contents than were written"
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"


def damaged(path: Path, what: str, way_on: str) -> UserError:
    return UserError(f"checkpoint {path} is damaged, {what}: {way_on}")


def finished_step(config: JobConfig) -> int | None:
    """The step at which the run of `config` ended, when there is nothing left to train; else None."""
    checkpoint = config.checkpoint
    steps = complete_steps(checkpoint_folder(config)) if checkpoint.resume and checkpoint.load_step == -1 else []
    return steps[-1] if steps and steps[-1] >= config.training.num_steps else None


def outlived_steps(steps: list[int], config: Checkpoint) -> list[int]:
    """Of the complete checkpoints of `steps`, ascending, those that `[checkpoint]` does not keep any longer."""
    snapshots = [step for step in steps if config.snapshot_interval and step % config.snapshot_interval == 0]
    others = [step for step in steps if step not in snapshots]
    kept = {*others[-config.keep_latest_k :], *snapshots[-config.keep_latest_snapshots :], *steps[-2:]}  # -0: all
    kept.update(_regular_steps(steps, config.interval)[-1:])
    return [step for step in steps if step not in kept]


def _regular_steps(steps: list[int], interval: int) -> list[int]:
    """Those that a stop or a milestone has not made in between."""
    return [step for step in steps if step % interval == 0]


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
    way_on: str
    """What the user can do when this checkpoint turns out to be damaged."""


def find_start(
    config: JobConfig, model_args: dict[str, Any], data_fingerprint: dict[str, Any] | None = None
) -> Start | None:
    """Decide what a start with `config` continues from; None means from random weights.

    Args:
        model_args: the fields of the model's arguments, as `dataclasses.asdict` gives them.
        data_fingerprint: what defines the order of the data, by configuration key; None leaves that to a later
            `check_same_data`.

    Raises:
        UserError: the checkpoint that was asked for is not there, is damaged, belongs to another model or other data,
            or ends with a step that was cut, after which the run cannot go on.
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
        path, model_only = folder / f"step-{step}", False
        older = [other for other in steps if other < step]
        way_on = (
            f"continue from an older one with --checkpoint.load_step {older[-1]}"
            if older
            else "there is no older one, so start again in another job.dump_folder"
        )
    elif checkpoint.initial_load_path is not None:
        path = Path(checkpoint.initial_load_path)
        if not is_complete(path):
            raise UserError(
                f"checkpoint.initial_load_path is {str(path)!r}, which is not a complete checkpoint (a `step-N` "
                f"folder with .metadata and {STATE_FILE})"
            )
        model_only = checkpoint.initial_load_model_only
        way_on = "choose another checkpoint.initial_load_path"
    else:
        return None
    start = Start(path, read_state(path, way_on), model_only, way_on)
    _check_same_model(start, config.model.name, model_args)
    _check_extendable(start, config.training)
    if data_fingerprint is not None:
        check_same_data(start, data_fingerprint)
    return start


def find_rollback(folder: Path, step: int, interval: int) -> Start | None:
    """The checkpoint that a failed `step` goes back to: the newest regular one before it. Those that a stop made in
    between are left alone, so that a run which was stopped goes back as far as one that was not."""
    steps = [saved for saved in _regular_steps(complete_steps(folder), interval) if saved < step]
    if not steps:
        return None
    path, way_on = folder / f"step-{steps[-1]}", "the run cannot go back to it"
    return Start(path, read_state(path, way_on), False, way_on)


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
    if start.model_only or start.state["data"].get("data.packing") == "first_fit":  # padded, never cut
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
    # Elsewhere the same files may be in another place; a state that was on the Hub does not say in which.
    for key, found, wanted in _differences(without_places(start.state["data"]), without_places(fingerprint)):
        raise UserError(
            f"{key} is {wanted} but checkpoint {start.path} was made with {found}, and the order of the data depends "
            "on it: restore the value, or start a new run from the weights with checkpoint.initial_load_path"
        )


def _differences(found: dict[str, Any], wanted: dict[str, Any]):
    for key in wanted | found:
        if found.get(key) != wanted.get(key):
            yield key, found.get(key), wanted.get(key)
