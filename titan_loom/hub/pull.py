"""Starting from the Hub: what a run is to begin or go on from is brought to its folder, as a checkpoint like any other.

"There is none" and "the Hub did not answer" are different: the second ends the run, with everything as it was.
"""

import shutil
from dataclasses import replace
from pathlib import Path

from titan_loom.config import JobConfig
from titan_loom.errors import UserError
from titan_loom.hub import training_state
from titan_loom.hub.convert import METRICS, from_hf
from titan_loom.hub.repository import Repository, ask
from titan_loom.hub.start import is_on_hub, parse, without_hub
from titan_loom.tools.logging import logger
from titan_loom.training import checkpoint_files
from titan_loom.training.checkpoint import make_empty

_STATE = f"{training_state.FOLDER}/{checkpoint_files.STATE_FILE}"


def fetch_newer(config: JobConfig, repository: Repository) -> None:
    """For `[hub] resume`: make the training state on the Hub the newest checkpoint of the run, with its metrics, when
    that is what it is.

    Raises:
        UserError: it holds anything but tensors and JSON, or is damaged.
        RunError: the Hub did not answer.
    """
    if not config.hub.resume or not config.checkpoint.resume or config.checkpoint.load_step != -1:
        return
    found, folder = f"hub.resume is true, hub.repo_id = {repository.repo_id!r}", _checkpoints(config)
    commit, files = ask(found, repository, repository.files)
    if _STATE not in files:
        logger.info(f"{repository.repo_id} holds no training state")
        return
    _refuse_pickles(repository.repo_id, files)
    way_on = "start without hub.resume"
    downloaded = _from_hub(config) / "download"
    make_empty(downloaded)
    try:
        _download(found, repository, commit, [_STATE], downloaded)
        state = checkpoint_files.read_state(downloaded / training_state.FOLDER, way_on)
        steps = checkpoint_files.complete_steps(folder)
        if steps and (steps[-1] >= state["step"] or not _is_of_run(folder / f"step-{steps[-1]}", state["run_id"])):
            return
        _download(found, repository, commit, [f"{training_state.FOLDER}/*", METRICS], downloaded)
        path = folder / f"step-{state['step']}"
        training_state.read(downloaded / training_state.FOLDER, path, way_on)
        (downloaded / METRICS).replace(Path(config.job.dump_folder) / METRICS)
        logger.info(f"Took step {state['step']} from {repository.repo_id}")
    finally:
        shutil.rmtree(downloaded)


def fetch_initial(config: JobConfig) -> JobConfig:
    """`config` with a checkpoint in the run's folder in place of an `initial_load_path` on the Hub. Raises as
    `fetch_newer`, and UserError when there is no such thing on the Hub."""
    checkpoint = config.checkpoint
    if not is_on_hub(checkpoint.initial_load_path):
        return config
    if checkpoint.resume and checkpoint_files.complete_steps(_checkpoints(config)):
        return without_hub(config)
    repo_id, revision = parse(checkpoint.initial_load_path)
    repository = Repository(repo_id, config.hub.timeout_seconds)
    found = f"checkpoint.initial_load_path is {checkpoint.initial_load_path!r}"
    commit, files = ask(found, repository, lambda: repository.files(revision))
    target = _from_hub(config) / (commit if checkpoint.initial_load_model_only else f"{commit}-state")
    if not checkpoint_files.is_complete(target):
        downloaded = _from_hub(config) / "download"
        make_empty(downloaded)
        try:
            if checkpoint.initial_load_model_only:
                _download(found, repository, commit, ["*.json", "*.safetensors", METRICS], downloaded)
                from_hf(downloaded, target)
            elif _STATE in files:
                _refuse_pickles(repo_id, files)
                _download(found, repository, commit, [f"{training_state.FOLDER}/*"], downloaded)
                way_on = "choose another checkpoint.initial_load_path"
                training_state.read(downloaded / training_state.FOLDER, target, way_on)
            else:
                raise UserError(f"{found}, which holds no training state: set checkpoint.initial_load_model_only")
        finally:
            shutil.rmtree(downloaded)
    return replace(config, checkpoint=replace(checkpoint, initial_load_path=str(target)))


def _refuse_pickles(repo_id: str, files: list[str]) -> None:
    for file in files:
        if file.startswith(f"{training_state.FOLDER}/") and not file.endswith((".safetensors", ".json")):
            raise UserError(f"{repo_id} has {file}, which may run code: a training state is safetensors and JSON alone")


def _download(found: str, repository: Repository, commit: str, patterns: list[str], folder: Path) -> None:
    ask(found, repository, lambda: repository.download(commit, patterns, folder))


def _is_of_run(checkpoint: Path, run_id: str) -> bool:
    return checkpoint_files.read_state(checkpoint, "delete it").get("run_id") == run_id


def _checkpoints(config: JobConfig) -> Path:
    return checkpoint_files.checkpoint_folder(config)


def _from_hub(config: JobConfig) -> Path:
    return Path(config.job.dump_folder) / "from_hub"
