"""Torch's elastic launcher as a library: torchrun's options, but its own way with output, signals and failures.

* Shown ranks write straight to the terminal (no pipe: progress bars work, nothing is late), the others to files.
* A signal reaches every worker once, and workers may take their time to save; a second Ctrl-C kills them.
* A failure is one line and an exit status, not a traceback of the launcher.
"""

import logging
import os
import signal
import sys
import time
import uuid
from argparse import Namespace
from pathlib import Path

import torch
from torch.distributed import DistError
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.api import LogsDest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher import api
from torch.distributed.run import config_from_args, determine_local_world_size, get_args_parser

from titan_loom.errors import UserError

SECONDS_TO_SAVE = 600
SECONDS_FOR_OTHER_HOSTS = 30
LINES_OF_LOG = 20


def parse_options(argv: list[str], *, fake: bool = False) -> Namespace:
    """Torchrun's options, with `nnodes` and `nproc_per_node` as integers and the rendezvous chosen.

    One host rendezvouses with itself on a free port, so that several runs share it; several hosts meet at
    `--master_addr`, `--master_port` by `--node_rank`. A `fake` launch starts no process, so it may have any number.

    Raises:
        UserError: a number of nodes or processes that cannot be.
        SystemExit: after `--help`, or an option that torchrun does not know.
    """
    parser = get_args_parser()
    parser.prog = "python -m titan_loom.launch"
    parser.set_defaults(
        nnodes="1",
        nproc_per_node=str(torch.cuda.device_count() or 1),
        local_ranks_filter=os.environ.get("LOG_RANK", "0"),
        master_port=29500,
        shutdown_timeout=SECONDS_TO_SAVE,
    )
    options = parser.parse_args(argv)
    if not options.nnodes.isdecimal() or int(options.nnodes) < 1:
        raise UserError(f"--nnodes (NNODES) is {options.nnodes!r}; it must be a number of hosts, 1 or greater")
    options.nnodes = int(options.nnodes)
    try:
        options.nproc_per_node = determine_local_world_size(options.nproc_per_node)
    except ValueError as error:
        raise UserError(f"--nproc_per_node (NGPU) is {options.nproc_per_node!r}: {error}") from None
    devices = 0 if fake else torch.cuda.device_count()
    if not 1 <= options.nproc_per_node <= (devices or sys.maxsize):
        allowed = f"from 1 to the {devices} CUDA devices of this host" if devices else "1 or greater"
        raise UserError(f"--nproc_per_node (NGPU) is {options.nproc_per_node}; it must be {allowed}")
    if options.nnodes > 1 and not 0 <= options.node_rank < options.nnodes:
        raise UserError(
            f"--node_rank (NODE_RANK) is {options.node_rank}; it must be from 0 to {options.nnodes - 1}, as --nnodes "
            f"(NNODES) is {options.nnodes}"
        )
    if not all(rank.strip().isdecimal() for rank in options.local_ranks_filter.split(",")):
        raise UserError(
            f"--local_ranks_filter (LOG_RANK) is {options.local_ranks_filter!r}; it must be comma separated ranks"
        )
    if options.nnodes == 1 and options.rdzv_backend == "static":
        options.rdzv_backend, options.rdzv_endpoint, options.rdzv_id = "c10d", "localhost:0", str(uuid.uuid4())
        options.local_addr = options.local_addr or "localhost"  # the host's name need not resolve
    return options


def run_workers(options: Namespace, log_folder: Path) -> int:
    """Run the workers of this host to their end; return the exit status: 0, 2 if a worker's was 2, else 1."""
    # What elastic has to say is said below, in one line.
    logging.getLogger("torch.distributed").handlers = [logging.NullHandler()]

    logs = None
    if options.redirects == options.tee == "0" and options.logs_specs is None:
        shown = {int(rank) for rank in options.local_ranks_filter.split(",")}
        # A folder for each start: another launcher must not cut the logs of a run that is still going.
        logs = RankLogs(Path(options.log_dir or log_folder / time.strftime("%Y%m%d-%H%M%S")), shown)
        options.log_dir = os.devnull  # or torch would make a temporary folder
    config, command, arguments = config_from_args(Namespace(**vars(options) | {"nnodes": str(options.nnodes)}))
    config.logs_specs = logs or config.logs_specs
    api.LocalElasticAgent = Agent  # `launch_agent` has no argument for it
    if options.nnodes > 1:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # waiting for the other hosts happens in C++
    try:
        api.launch_agent(config, command, arguments)
    except ChildFailedError as error:
        return _report(error.failures, logs.files if logs else {})
    except SignalException as stop:
        print(f"stopped by {stop.sigval.name}", file=sys.stderr)
        return 1
    except (DistError, RendezvousError) as error:
        place = f"{options.master_addr}:{options.master_port}" if options.nnodes > 1 else "this host"
        print(f"error: no rendezvous at {place}: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    return 0


class RankLogs(LogsSpecs):
    """Local ranks in `shown` inherit the terminal, every other rank has `rank<r>.out` and `rank<r>.err` in `folder`."""

    def __init__(self, folder: Path, shown: set[int]):
        super().__init__(log_dir=str(folder), local_ranks_filter=shown)
        self.files: dict[int, Path] = {}
        """What a rank that is not shown writes to stderr, by global rank."""

    @property
    def root_log_dir(self) -> str:
        return self._root_log_dir

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        terminal = dict.fromkeys(envs, "")
        logs = LogsDest(stdouts=terminal.copy(), stderrs=terminal.copy(), error_files=dict.fromkeys(envs, os.devnull))
        for local_rank, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = ""
            env["LAUNCHER_PID"] = str(os.getpid())
            if local_rank in self._local_ranks_filter:
                continue
            folder, rank = Path(self.root_log_dir), int(env["RANK"])
            folder.mkdir(parents=True, exist_ok=True)
            self.files[rank] = folder / f"rank{rank}.err"
            logs.stdouts[local_rank] = str(folder / f"rank{rank}.out")
            logs.stderrs[local_rank] = str(self.files[rank])
        return logs


class Agent(LocalElasticAgent):
    """Forwards the first signal and waits for the workers to save; torch's would forward and wait anew for each."""

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = SECONDS_TO_SAVE) -> None:
        workers = self._pcontext
        if workers is not None:
            for name in ("SIGTERM", "SIGHUP", "SIGQUIT"):
                signal.signal(getattr(signal, name), signal.SIG_IGN)

            def kill(*_: object) -> None:
                for handler in workers.subprocess_handlers.values():
                    handler.proc.kill()

            signal.signal(signal.SIGINT, kill)
            # A worker saves on these two; a lost terminal is a reason to save as well.
            workers.close(signal.SIGINT if death_sig == signal.SIGINT else signal.SIGTERM, timeout)
        super()._shutdown()

    def _exit_barrier(self) -> None:
        # The wait for the other hosts is in C++, where no handler of Python's runs. The workers have ended, so that a
        # signal may end this process at once.
        for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        self._exit_barrier_timeout = SECONDS_FOR_OTHER_HOSTS
        super()._exit_barrier()


def _report(failures: dict[int, ProcessFailure], files: dict[int, Path]) -> int:
    """Say in one line what ended the run; return the exit status."""
    mistakes = {rank: failure for rank, failure in failures.items() if failure.exitcode == 2}
    rank, failure = min((mistakes or failures).items(), key=lambda item: item[1].timestamp)
    file = files.get(rank)
    if mistakes:
        if all(rank in files for rank in mistakes):  # a shown rank would have printed the sentence
            print(
                "".join(file.read_text(errors="replace").splitlines(keepends=True)[-LINES_OF_LOG:]),
                end="",
                file=sys.stderr,
            )
        return 2
    code = failure.exitcode
    if code == 1 and file is None:
        return 1  # a shown rank has said why
    how = f"exit status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
    where = f"; its output is in {file}" if file is not None else ""
    print(f"error: rank {rank} ended with {how}{where}", file=sys.stderr)
    return 1
