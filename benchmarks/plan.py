"""Every configuration on clusters that are not there: rank 0's step among 8, 64 and 512 processes on fake tensors.

    python benchmarks/plan.py [--ranks 8 64 512] [--configs loom_1p7b ...]

Runs `run_train.sh --comm.mode fake` for every file in train_configs/. Where its batch does not divide by so many
processes, which has to end in one sentence and status 2, one sequence for each process and as many lanes are taken
instead. Prints the memory of a rank at its fullest moment, what its collectives move in a step, the padding that
sharding causes and the time of it all. Exits 1 if one fails or takes more than a minute. Takes about ten minutes.
"""

import argparse
import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")


def run(config: Path, ranks: int, folder: str, *overrides: str) -> subprocess.CompletedProcess:
    command = [REPOSITORY / "run_train.sh", "--comm.mode", "fake", "--job.dump_folder", folder, *overrides]
    environment = os.environ | {"CONFIG_FILE": str(config), "NGPU": str(ranks), "COLUMNS": "200"}
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)


def mebibytes(output: str, row: str) -> float:
    """The number in a row of the plan's table; 0 without that row."""
    found = re.search(rf"{row} .*?([\d,]+\.\d)", output)
    return float(found[1].replace(",", "")) if found else 0.0


def main() -> None:
    names = sorted(file.stem for file in REPOSITORY.glob("train_configs/*.toml"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 64, 512])
    parser.add_argument("--configs", nargs="+", default=names, choices=names)
    args = parser.parse_args()
    missed = False
    print(f"{'configuration':18}{'ranks':>6}{'batch':>9}{'peak MiB':>11}{'moved MiB':>11}{'padding':>9}{'seconds':>9}")
    for name, ranks in itertools.product(args.configs, args.ranks):
        config, batch = REPOSITORY / "train_configs" / f"{name}.toml", "its own"
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            result = run(config, ranks, folder)
            if result.returncode == 2 and result.stderr.count("\n") == 1:
                batch = str(ranks)
                sizes = ("--training.local_batch_size", "1", "--training.global_batch_size", batch)
                started = time.perf_counter()
                result = run(config, ranks, folder, *sizes, "--data.lanes", batch)
            seconds = time.perf_counter() - started
        peak = mebibytes(result.stdout, "memory at the peak")
        moved = sum(mebibytes(result.stdout, kind) for kind in COLLECTIVES)
        padding = re.search(r"by ([\d.]+ %)", result.stdout)
        is_met = result.returncode == 0 and padding is not None and seconds < 60
        missed |= not is_met
        print(
            f"{name:18}{ranks:6}{batch:>9}{peak:11,.1f}{moved:11,.1f}{padding[1] if padding else '':>9}"
            f"{seconds:9.1f}{'' if is_met else '   MISSED'}",
            flush=True,
        )
        if result.returncode:
            print(result.stderr, file=sys.stderr)
    sys.exit(missed)


if __name__ == "__main__":
    main()
