"""What compile.py and throughput.py share: a nanocoder that takes real training steps in a process of its own."""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titan_loom.trainer import Trainer

STARTED = time.time()

CONFIG = """
[job]
dump_folder = "{folder}/run"
[model]
flavor = "nanocoder"
[data]
lanes = 1
[data.sources.code]
path = "embedded:code"
format = "repository"
[training]
steps = 1000
local_batch_size = {micro_batch}
global_batch_size = {micro_batch}
seq_len = {seq_len}
mixed_precision_param = "{dtype}"
[checkpoint]
enable = false
[metrics]
log_freq = 1000
[compile]
enable = {compile}
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=5, help="timed steps; the median counts")
    parser.add_argument("--micro_batch", type=int, default=4)
    parser.add_argument("--seq_len", type=int, default=1024)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="of parameters and activations; default: both")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, default=STARTED, help=argparse.SUPPRESS)


def start_process(args: argparse.Namespace, child: str, dtype: str, cache: str) -> subprocess.Popen:
    """This script, run again with `--child`; `cache` is the compiler's."""
    command = [sys.executable, sys.argv[0], "--child", child, "--dtype", dtype, "--started", str(time.time())]
    command += ["--steps", str(args.steps), "--micro_batch", str(args.micro_batch), "--seq_len", str(args.seq_len)]
    environment = os.environ | {"LOG_RANK": "", "TORCHINDUCTOR_CACHE_DIR": cache}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def answer(process: subprocess.Popen) -> Any:
    """The next line that `process` prints, as JSON."""
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args[1]} ended with status {process.wait()}")
    return json.loads(line)


def trainer(folder: str, *overrides: str, compile: bool, more: str = "", **values) -> "Trainer":
    """A trainer of `CONFIG` with `values`, and of `more` TOML."""
    from titan_loom.config import load_config
    from titan_loom.trainer import Trainer

    path = os.path.join(folder, "run.toml")
    with open(path, "w") as file:
        file.write((CONFIG + more).format(folder=folder, compile=str(compile).lower(), **values))
    return Trainer(load_config(["--job.config_file", path, *overrides]))


def trainer_of(args: argparse.Namespace, folder: str) -> "Trainer":
    """The trainer that the options describe; compiled if the child is called so."""
    compile = args.child == "compiled"
    return trainer(folder, compile=compile, micro_batch=args.micro_batch, seq_len=args.seq_len, dtype=args.dtype)


def timed_steps(run: "Trainer") -> Iterator[float]:
    """Takes a step each time; gives its seconds."""
    while True:
        start = time.perf_counter()
        run.step += 1
        run.train_step()
        run.metrics.flush()
        yield time.perf_counter() - start


def describe_machine() -> str:
    import torch

    from titan_loom.optim.newton_schulz import lacks_products

    instructions = "no bf16 instructions" if lacks_products(torch.bfloat16) else "bf16 instructions"
    return f"load average {os.getloadavg()[0]:.2f}, {os.cpu_count()} cores, {instructions}"
