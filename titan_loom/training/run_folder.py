"""The folder of a run: one process group at a time writes to it."""

import fcntl
import os
import shutil
import time
from pathlib import Path

from titan_loom.config import JobConfig
from titan_loom.config.loading import to_toml
from titan_loom.errors import RunError, UserError
from titan_loom.tools.logging import logger
from titan_loom.training import checkpoint_files

LOCK_WAIT_SECONDS = 60


def check_can_be_written(config: JobConfig) -> None:
    """Check, and change nothing, that the run's folders are folders or can be made. Raises UserError."""
    dump_folder = config.job.dump_folder
    for key, found, path in (
        ("job.dump_folder", dump_folder, Path(dump_folder)),
        ("checkpoint.folder", config.checkpoint.folder, Path(dump_folder, config.checkpoint.folder)),
        ("metrics.save_tb_folder", config.metrics.save_tb_folder, Path(dump_folder, config.metrics.save_tb_folder)),
    ):
        try:
            there = next(folder for folder in (path, *path.parents) if folder.exists())
        except OSError as error:  # a name that is too long, a folder that may not be entered
            raise _unusable(key, found, error.strerror) from error
        if not there.is_dir():
            raise _unusable(key, found, f"{there} is no folder")
        if not os.access(there, os.W_OK | os.X_OK):
            raise _unusable(key, found, f"{there} may not be written to")


def _unusable(key: str, found: str, reason: str) -> UserError:
    return UserError(f"{key} is {found!r}; it must be a folder that can be written to: {reason}")


class RunFolder:
    """Rank 0's hold on `[job] dump_folder`, until `close` or the end of the process, however it ends."""

    def __init__(self, config: JobConfig):
        check_can_be_written(config)
        self.path = Path(config.job.dump_folder)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / ".lock", "w")
            self._acquire()
        except OSError as error:
            raise _unusable("job.dump_folder", config.job.dump_folder, error.strerror) from error
        checkpoints = checkpoint_files.checkpoint_folder(config)
        checkpoint_files.remove_leftovers(checkpoints)
        for path in checkpoint_files.incomplete_steps(checkpoints):
            logger.warning(f"Passing over {path}, which is no complete checkpoint")

    def write_config(self, config: JobConfig) -> None:
        """Write the effective configuration, which can be run again as it is. Raises RunError when the disk is full."""
        try:
            aside = self.path / ".config.toml"
            aside.write_text(to_toml(config))
            aside.replace(self.path / "config.toml")
        except OSError as error:
            raise RunError(f"{self.path / 'config.toml'} could not be written: {error}") from error

    def clear(self, config: JobConfig) -> None:
        """Delete what an earlier run left, as `[job] overwrite` allows."""
        tensorboard = self.path / config.metrics.save_tb_folder
        for path in (checkpoint_files.checkpoint_folder(config), tensorboard, self.path / "outbox"):
            shutil.rmtree(path, ignore_errors=True)
        (self.path / "metrics.jsonl").unlink(missing_ok=True)

    def set_aside_after(self, config: JobConfig, step: int) -> None:
        """Keep the checkpoints after `step` from being taken for this run's own."""
        for path in checkpoint_files.set_aside_after(checkpoint_files.checkpoint_folder(config), step):
            logger.info(f"Continuing from step {step}: renamed a later checkpoint to {path}")

    def close(self) -> None:
        self._lock.close()

    def _acquire(self) -> None:
        # A record lock, not flock: forked data workers must not keep it alive after this process was killed.
        deadline = time.monotonic() + LOCK_WAIT_SECONDS
        waiting = False
        while True:
            try:
                return fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"job.dump_folder {str(self.path)!r} is in use by another run: wait for it or choose another"
                    ) from None
            if not waiting:
                logger.info(f"Waiting for another run to leave {self.path}")
                waiting = True
            time.sleep(0.2)
