"""Pushing milestones to the Hub: the process that rank 0 starts beside the run (`titan_loom.hub.outbox`).

It takes the checkpoints of the outbox, oldest first: export, one commit whose title names run and step, the tags. Each
of these asks first whether it has been done, so that after a kill at any moment nothing comes twice or is left out.
What fails is tried again for as long as the run lasts.
"""

import json
import os
import random
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

from huggingface_hub.utils.logging import set_verbosity_error

from titan_loom.errors import RunError, UserError
from titan_loom.hub import training_state
from titan_loom.hub.convert import to_hf
from titan_loom.hub.repository import Repository, reason
from titan_loom.tools.logging import init_logger, logger
from titan_loom.training import checkpoint_files

LONGEST_WAIT_SECONDS = 60.0
TRIES_TO_CONVERT = 3


class Pusher:
    """Pushes what is in a folder.

    Args:
        folder: checkpoints by the name `step-N`; what is pushed is deleted.
        hub: `[hub]` as a table.
        tags: by step.
        dtype, tokenizer_path: of the exports.
    """

    def __init__(
        self, folder: Path, hub: dict[str, Any], tags: dict[int, list[str]], dtype: str, tokenizer_path: str | None
    ):
        self.folder = folder
        self.hub = hub
        self.tags = tags
        self.dtype = dtype
        self.tokenizer_path = tokenizer_path
        self.repository = Repository(hub["repo_id"], hub["timeout_seconds"])
        self.export = folder / "export"

    def push_all(self) -> None:
        """Returns when nothing waits."""
        while steps := checkpoint_files.complete_steps(self.folder):
            shutil.rmtree(self.export, ignore_errors=True)
            self._push_until_done(self.folder / f"step-{steps[0]}")
        shutil.rmtree(self.export, ignore_errors=True)

    def _push_until_done(self, checkpoint: Path) -> None:
        what = f"{checkpoint.name} to {self.hub['repo_id']}"
        tries, conversions = 0, 0
        while checkpoint.exists():  # or the run has given it up
            try:
                self.repository.limit_time()
                self._push(checkpoint)
                break
            except (UserError, RunError) as error:
                why, conversions = str(error), conversions + 1
                if conversions == TRIES_TO_CONVERT:
                    logger.warning(f"Gave up pushing {what}: {why}")
                    break
            except Exception as error:  # whatever foreign code meets on a network
                why = reason(error)
            tries += 1
            if tries == 1:
                logger.warning(f"Pushing {what} has failed: {why}; it is tried again while the run goes on")
            time.sleep(min(LONGEST_WAIT_SECONDS, 2.0 ** min(tries - 1, 10)) * random.uniform(0.5, 1.0))
        if checkpoint.exists():
            checkpoint_files.remove(checkpoint)

    def _push(self, checkpoint: Path) -> None:
        repository = self.repository
        state = checkpoint_files.read_state(checkpoint, "it is not pushed")
        step, run_id = state["step"], state["run_id"]
        tags = self.tags.get(step, [])
        title = f"Step {step} of run {run_id}"
        commits = repository.commits()
        commit = next((commit for commit, found in commits.items() if found == title), None)
        if commit is None:
            self._make_way(run_id)
            if not self.export.exists():
                self._convert(checkpoint)
            commit = repository.api.upload_folder(
                repo_id=repository.repo_id,
                folder_path=self.export,
                commit_message=title,
                # A try that seemed to fail and is done later after all comes too late then.
                parent_commit=next(iter(commits)),
                delete_patterns=["*.safetensors", "*.safetensors.index.json", "training_state/*"],
            ).oid
        for tag in tags:
            repository.tag(tag, commit)
        logger.info(f"Pushed step {step} to {repository.repo_id} as {', '.join(tags) or 'no tag'}")

    def _make_way(self, run_id: str) -> None:
        """Before the first step of a run: another run's tags go, if they may."""
        found = self.repository.run_id()
        if found in (None, run_id):
            return
        if not self.hub["overwrite"]:
            raise UserError(f"{self.repository.repo_id} holds another run's steps by now")
        for tag in self.repository.tags():
            self.repository.api.delete_tag(self.repository.repo_id, tag=tag)

    def _convert(self, checkpoint: Path) -> None:
        to_hf(checkpoint, self.export, self.dtype, self.tokenizer_path)
        if self.hub["push_training_state"]:
            training_state.write(checkpoint, self.export / training_state.FOLDER)


def main(settings: dict[str, Any]) -> None:
    parent = settings.pop("parent")
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    init_logger()
    set_verbosity_error()  # its repetitions are its own affair
    tags = {int(step): tags for step, tags in settings.pop("tags").items()}
    Pusher(**settings | {"folder": Path(settings["folder"]), "tags": tags}).push_all()


def _leave_with(parent: int) -> None:
    """A trainer that is killed must not leave this behind, pushing beside the next start."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


if __name__ == "__main__":
    os.nice(19)
    main(json.loads(sys.argv[1]))
