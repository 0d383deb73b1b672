"""Starts the workers of this host: `python -m titan_loom.launch [torchrun's options] -m titan_loom.train ...`.

The configuration is checked first, without torch and without a worker, so that a mistake is one sentence within a
second. Exit status: 0 done, 2 the user's mistake, else 1.
"""

import os
import sys
from pathlib import Path
from types import ModuleType

from titan_loom.config import load_config
from titan_loom.errors import RunError, UserError
from titan_loom.preflight import is_finished, preflight

TRAIN_MODULE = "titan_loom.train"


def main(argv: list[str] | None = None) -> int:
    """Launch what `argv` describes, wait for it and return the exit status."""
    try:
        return launch(sys.argv[1:] if argv is None else argv)
    except (UserError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        return 1


def launch(argv: list[str]) -> int:
    """Run any module or script as torchrun would; for `titan_loom.train`, check its configuration before.

    Raises:
        UserError: a mistake in the launcher's options or in the configuration.
        RunError: what a finished run had left to do failed.
    """
    config = load_config(argv[argv.index(TRAIN_MODULE) + 1 :]) if TRAIN_MODULE in argv else None

    elastic = _import_elastic()
    is_fake = config is not None and config.comm.mode == "fake"
    options = elastic.parse_options(argv, fake=is_fake)
    if config is not None:
        world_size = options.nnodes * options.nproc_per_node
        preflight(config, world_size)
        if is_fake:
            from titan_loom import plan

            plan.main(config, world_size)
            return 0
        if is_finished(config):
            return 0
    run_folder = Path(config.job.dump_folder) if config is not None else Path()
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # Each process would take every core otherwise.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // options.nproc_per_node)))
    return elastic.run_workers(options, run_folder / "logs")


def _import_elastic() -> ModuleType:
    """Import torch with its C++ warnings off, in this process only: workers keep theirs.

    When several hosts have finished, the one that held their store may leave before the others have read its last
    word, which is no error but would print a stack trace.
    """
    level = os.environ.get("TORCH_CPP_LOG_LEVEL")
    os.environ["TORCH_CPP_LOG_LEVEL"] = level or "ERROR"
    from titan_loom.distributed import elastic

    if level is None:
        del os.environ["TORCH_CPP_LOG_LEVEL"]
    return elastic


if __name__ == "__main__":
    sys.exit(main())
