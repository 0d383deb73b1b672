"""What pushing milestones to the Hub costs the steps of a run, while the Hub works and while it does not.

    python benchmarks/hub.py [--rounds 3] [--steps 40] [--processes 1]

The debug run, checkpoints at 25, 50, 75 and 100 %: without a hub, the same once more (what that differs by is noise),
and with one on this machine that works, answers 500, keeps silent or closes the connection from the first step on until
the last is trained and the run has warned (its lowly process may come to nothing before on a busy machine). Each round
runs all of them, one after the other, from another one on. A step's time is that of metrics.jsonl: its tokens over
`tps`, without what is between steps (saving, queueing). The first step is left out. Ratios are to the run without a hub
of the same round. Training processes take a core each; the hub and the process that pushes need another one, or they
share theirs: the load is printed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.hub_server import FOREVER, HubServer
from tests.processes import read_until

REPOSITORY = Path(__file__).parents[1]
NAME = "Owner/model"
FAULTS = {
    "works": None,
    "answers 500": {"do": "status"},
    "is silent": {"do": "stall"},
    "closes": {"do": "cut", "at": 0},
}
BATCH, SEQ_LEN = 8, 128


@dataclass
class Run:
    seconds: list[float]
    """Of each step but the first."""
    status: int
    warned: bool
    tags: dict[str, int]
    """The step of each tag, at the end."""


def run(folder: Path, steps: int, num_processes: int, hub: HubServer | None, fault: dict | None) -> Run:
    options = {
        "job.dump_folder": folder,
        "training.steps": steps,
        "training.global_batch_size": BATCH,
        "training.seq_len": SEQ_LEN,
        "checkpoint.interval": steps // 4,
        "metrics.log_freq": 1,
    }
    environment = os.environ | {"NGPU": str(num_processes), "OMP_NUM_THREADS": "1"}
    if hub is not None:
        options |= {"hub.repo_id": NAME, "hub.milestones": "25%,50%,75%,100%", "hub.timeout_seconds": 2}
        environment |= hub.environment(folder, "hf_token")
    command = [REPOSITORY / "run_train.sh"]
    command += [word for key, value in options.items() for word in (f"--{key}", str(value))]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        read_until(process, "Training starts")
        if fault is not None:
            hub.fault("", times=FOREVER, **fault)
        trained = warned = False
        for line in process.stdout:
            trained |= "Training completed" in line
            warned |= "Pushing step" in line and "has failed" in line
            if hub is not None and trained and warned:
                hub.faults.clear()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][1:]
    tags = {}
    if hub is not None:
        repo = hub.repo(NAME, "model")
        tags = {tag: int(repo.find(tag).title.split()[1]) for tag in repo.tags}
    tokens = BATCH * SEQ_LEN / num_processes
    return Run([tokens / row["tps"] for row in rows], process.returncode, warned, tags)


def quantile(seconds: list[float], share: float) -> float:
    return statistics.quantiles(seconds, n=100, method="inclusive")[round(share * 100) - 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    started = time.perf_counter()
    print(f"load average {os.getloadavg()[0]:.2f}, {os.cpu_count()} cores, {args.rounds} rounds", flush=True)

    modes = ["without", "without again", *FAULTS]
    runs: dict[str, list[Run]] = {mode: [] for mode in modes}
    for i in range(args.rounds):
        for mode in modes[i % len(modes) :] + modes[: i % len(modes)]:
            with tempfile.TemporaryDirectory() as folder, HubServer() as hub:
                own = hub if mode in FAULTS else None
                runs[mode].append(run(Path(folder), args.steps, args.processes, own, FAULTS.get(mode)))

    print(f"\n{'hub':15}{'median':>9}{'in each round':>20}{'95th pct':>10}{'in each round':>20}  status  warned  tags")
    for mode in modes:
        row = f"{mode:15}"
        for share in (0.5, 0.95):
            own = [quantile(run.seconds, share) for run in runs[mode]]
            ratios = [mine / quantile(run.seconds, share) for mine, run in zip(own, runs["without"], strict=True)]
            if mode == "without":
                row += f"{statistics.median(own) * 1000:{9 if share == 0.5 else 10}.0f}"
                row += f"{' '.join(f'{seconds * 1000:.0f}' for seconds in own) + ' ms':>20}"
            else:
                row += f"{statistics.median(ratios):{9 if share == 0.5 else 10}.2f}"
                row += f"{' '.join(f'{ratio:.2f}' for ratio in ratios):>20}"
        statuses = ",".join(sorted({str(run.status) for run in runs[mode]}))
        warned = f"{sum(run.warned for run in runs[mode])} of {args.rounds}"
        tags = " ".join(map(str, sorted(runs[mode][-1].tags.values())))
        same = "" if all(run.tags == runs[mode][-1].tags for run in runs[mode]) else " (not in every round)"
        print(f"{row}  {statuses:6}  {warned:6}  {tags}{same}")
    print(f"\nload average {os.getloadavg()[0]:.2f}, {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
