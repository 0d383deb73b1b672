"""Pushing milestones to the Hub while the run goes on: the trainer's side.

A milestone's checkpoint is linked into the folder `outbox`, which copies nothing and lets the run delete its own. What
lies there is converted and pushed, oldest first, by a process of low priority (`titan_loom.hub.push`) and then deleted.
So what is not pushed when a run ends, however it ends, is there for its next start.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path

from titan_loom.config import JobConfig
from titan_loom.config.milestones import milestone_tags
from titan_loom.tools.logging import logger
from titan_loom.training import checkpoint_files
from titan_loom.training.run_folder import RunFolder
from titan_loom.training.signals import StopRequest

MAX_WAITING = 8
"""Checkpoints that wait at most; of more, the oldest is given up."""

COMMAND = [sys.executable, "-m", "titan_loom.hub.push"]
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
"""Of the process that pushes: no accelerator, one thread."""


class Outbox:
    """Rank 0's queue of checkpoints to push; whatever happens to them, the run goes on. Begins with what an earlier
    start has left."""

    def __init__(self, config: JobConfig):
        self.folder = outbox_folder(config)
        self.hub = config.hub
        self.tags = milestone_tags(config.hub.milestones, config.training)
        self._settings = json.dumps(
            {
                "folder": str(self.folder),
                "hub": asdict(config.hub),
                "tags": self.tags,
                "dtype": config.checkpoint.export_dtype,
                "tokenizer_path": config.model.tokenizer_path,
                "parent": os.getpid(),
            }
        )
        self._process: subprocess.Popen | None = None
        self._start()

    def add(self, checkpoint: Path) -> None:
        """Queue the checkpoint if it is a milestone's."""
        step = int(checkpoint.name.removeprefix("step-"))
        if step not in self.tags:
            return
        try:
            _link(checkpoint, self.folder / checkpoint.name)
            for old in checkpoint_files.complete_steps(self.folder)[:-MAX_WAITING]:
                checkpoint_files.remove(self.folder / f"step-{old}")
                logger.warning(f"Gave up pushing {self._describe(old)}: {MAX_WAITING} later checkpoints wait")
        except OSError as error:
            logger.warning(f"Gave up pushing {self._describe(step)}: {self.folder} could not be written: {error}")
        self._start()

    def flush(self, stop: StopRequest) -> None:
        """Wait until everything is pushed, `[hub] flush_seconds` at most and not when asked to stop; say what is not
        pushed."""
        deadline = time.monotonic() + self.hub.flush_seconds
        while checkpoint_files.complete_steps(self.folder) and time.monotonic() < deadline and not stop:
            self._start()
            with suppress(subprocess.TimeoutExpired):
                if self._process is None or self._process.wait(0.2):
                    break  # it has said why
        self.close()
        if waiting := checkpoint_files.complete_steps(self.folder):
            logger.warning(
                f"Gave up pushing {', '.join(map(self._describe, waiting))} (hub.flush_seconds is "
                f"{self.hub.flush_seconds:g}): the next start pushes what waits in {self.folder}"
            )

    def close(self) -> None:
        """Stop pushing. What waits stays."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _start(self) -> None:
        is_running = self._process is not None and self._process.poll() is None
        if is_running or not checkpoint_files.complete_steps(self.folder):
            return
        try:
            self._process = subprocess.Popen(
                [*COMMAND, self._settings],
                env=os.environ | ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                # Ctrl-C is for the trainer. Not a session: Linux shares the cores evenly among those, whatever the
                # priorities in them.
                process_group=0,
            )
        except OSError as error:
            logger.warning(f"Nothing is pushed to {self.hub.repo_id} for now: {error}")

    def _describe(self, step: int) -> str:
        return f"step {step} ({', '.join(self.tags.get(step, ['no milestone any more']))}) to {self.hub.repo_id}"


def outbox_folder(config: JobConfig) -> Path:
    return Path(config.job.dump_folder) / "outbox"


def push_what_waits(config: JobConfig) -> None:
    """Push what a run that has finished could not, if anything waits."""
    if config.hub.repo_id is not None and checkpoint_files.complete_steps(outbox_folder(config)):
        with closing(RunFolder(config)):
            Outbox(config).flush(StopRequest())


def _link(checkpoint: Path, path: Path) -> None:
    """Give the checkpoint a second name, all at once; copies where the file system has no links."""
    if checkpoint_files.is_complete(path):
        return
    aside = path.with_name(f".{path.name}.writing")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for file in checkpoint.iterdir():
        try:
            os.link(file, aside / file.name)
        except OSError:
            shutil.copy(file, aside)
    aside.rename(path)
