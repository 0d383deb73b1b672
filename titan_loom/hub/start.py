"""Where a run starts, the Hub included: its own folder, a training state on the Hub, an export there, nowhere."""

import re
import uuid
from dataclasses import replace
from typing import Any

from titan_loom.config import JobConfig
from titan_loom.errors import UserError
from titan_loom.training import checkpoint_files

PREFIX = "hf://"
_PATH = re.compile(r"hf://([^/@]+/[^/@]+)(?:@(.+))?")


def find_start(config: JobConfig, model_args: dict[str, Any]) -> tuple[checkpoint_files.Start | None, str]:
    """What a start with `config` continues from, as `checkpoint_files.find_start`, and the id of the run, by which a
    repository knows it. What is taken from the Hub lies in the run's folder afterwards.

    Raises:
        UserError: as there; and the repository to push to may not be written, or is another run's.
        RunError: the Hub did not answer.
    """
    hub, repository = config.hub, None
    if hub.repo_id is not None or is_on_hub(config.checkpoint.initial_load_path):
        from titan_loom.hub import pull  # slow to import
        from titan_loom.hub import repository as repositories

        if hub.repo_id is not None:
            repository = repositories.Repository(hub.repo_id, hub.timeout_seconds)
            repositories.open_to_push(repository, hub.private)
            pull.fetch_newer(config, repository)
        config = pull.fetch_initial(config)
    start = checkpoint_files.find_start(config, model_args)
    run_id = (start.state.get("run_id") if is_continued(config, start) else None) or uuid.uuid4().hex
    if repository is not None:
        repositories.check_owner(repository, run_id, hub.overwrite)
    return start, run_id


def is_continued(config: JobConfig, start: checkpoint_files.Start | None) -> bool:
    """Whether `start` is a checkpoint of the run itself, not what another run starts from."""
    return start is not None and start.path.parent == checkpoint_files.checkpoint_folder(config)


def is_on_hub(path: str | None) -> bool:
    return path is not None and path.startswith(PREFIX)


def parse(path: str) -> tuple[str, str]:
    """Repository and revision of `hf://owner/name[@revision]`."""
    if match := _PATH.fullmatch(path):
        return match[1], match[2] or "main"
    raise UserError(f"checkpoint.initial_load_path is {path!r}; on the Hub it must be hf://owner/name[@revision]")


def without_hub(config: JobConfig) -> JobConfig:
    """`config` without an `initial_load_path` on the Hub, whose form is checked."""
    if not is_on_hub(config.checkpoint.initial_load_path):
        return config
    parse(config.checkpoint.initial_load_path)
    return replace(config, checkpoint=replace(config.checkpoint, initial_load_path=None))
