"""The entry point of every worker: `python -m titan_loom.train --job.config_file X`, alone or under a launcher.

Exit status: 0 done, 2 the user's mistake, else 1. Whatever is a UserError or a RunError is one sentence on stderr.
"""

import os
import signal
import sys
import time
from contextlib import closing

from titan_loom.config import load_config
from titan_loom.errors import Interrupted, RunError, UserError
from titan_loom.preflight import is_finished, preflight
from titan_loom.tools.logging import init_logger
from titan_loom.training.signals import leave_with_launcher, run_and_exit

SECONDS_FOR_RANK_0 = 30.0


def main() -> int:
    """Run the trainer that `sys.argv` describes; return the exit status."""
    leave_with_launcher()
    try:
        config = load_config(sys.argv[1:])
        init_logger()
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if os.environ.get("LOCAL_RANK", "0") == "0":  # once a host: each has its own folders
            preflight(config, world_size)
        if config.comm.mode == "fake":
            from titan_loom import plan

            plan.main(config, world_size)
            return 0
        if is_finished(config):
            return 0
        from titan_loom.trainer import Trainer

        with closing(Trainer(config)) as trainer:
            trainer.train()
        # The ranks have parted, so that none waits for this at a collective.
        if config.checkpoint.last_save_in_hf and os.environ.get("RANK", "0") == "0":
            from titan_loom.hub.convert import export_last

            export_last(config, config.training.num_steps)
    except (UserError, RunError) as error:
        _wait_for_rank_0()
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except Interrupted as stop:
        if os.environ.get("RANK", "0") == "0":
            print(stop, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 1
    return 0


def _wait_for_rank_0() -> None:
    """Let rank 0 say it: every rank raises the same, but a launcher ends them all at the first exit."""
    if os.environ.get("RANK", "0") != "0":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(SECONDS_FOR_RANK_0)


if __name__ == "__main__":
    run_and_exit(main)
