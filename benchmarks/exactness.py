"""The promises about numbers, measured through run_train.sh on the debug configurations.

    python benchmarks/exactness.py [--family loom]

Three tables: runs that stop and continue against an uninterrupted one (to the last digit); other numbers of processes
and micro-batches against one process (largest relative difference of losses and gradient norms); checkpoints of four
processes continued by one and two (batch hashes). Takes about ten minutes on two cores. Exits 1 if a promise is broken.
LOOM, on shorter sequences, trains a segment of loops at a time, with the guard, and validates at its end.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
COMMON = ("--lr_scheduler.total_steps", "20", "--lr_scheduler.warmup_steps", "4", "--debug.hash_batches", "true")
EXACT = ("step", "loss", "ce_loss", "z_loss", "grad_norm", "tokens_seen", "source_tokens", "batch_sha256", "segments")


@dataclass(frozen=True, kw_only=True)
class Family:
    config: str
    limits: dict[str, tuple[float, float]]
    """By optimizer: of the losses, of the norms."""
    length: tuple[str, ...]
    """Of the runs that are compared with one process."""
    overrides: tuple[str, ...] = ()


FAMILIES = {
    "nanocoder": Family(
        config="debug.toml",
        limits={"AdamW": (1e-5, 1e-4), "Muon": (2e-3, 2e-3)},
        # The last step has uneven labels.
        length=("--training.steps", "none", "--training.total_tokens", str(19 * 16 * 256 + 1001)),
    ),
    # Rows have uneven labels in every step. A last bit can send a token to another expert.
    "loom": Family(
        config="loom_debug.toml",
        limits={"AdamW": (1e-4, 1e-4)},
        length=("--training.steps", "20"),
        overrides=("--training.seq_len", "63"),
    ),
}

family = FAMILIES["nanocoder"]
broken = []


def train(folder: Path, world_size: int, *overrides: str) -> list[dict]:
    command = [REPOSITORY / "run_train.sh", "--job.dump_folder", str(folder), *COMMON, *family.overrides, *overrides]
    config = str(REPOSITORY / "train_configs" / family.config)
    environment = os.environ | {"CONFIG_FILE": config, "NGPU": str(world_size), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steps(n: int) -> tuple[str, str]:
    return "--training.steps", str(n)


def workers(n: int) -> tuple[str, str]:
    return "--training.dataloader.num_workers", str(n)


def exact(row: dict) -> dict:
    return {key: row.get(key) for key in EXACT}


def report(what: str, figure: str, holds: bool) -> None:
    print(f"{what:72}{figure:>26}  {'holds' if holds else 'BROKEN'}", flush=True)
    if not holds:
        broken.append(what)


def exact_resume(root: Path) -> None:
    print("\nStopped and continued, against one run of 20 steps: equal to the last digit")
    for world_size in (1, 2):
        reference = list(map(exact, train(root / f"r{world_size}", world_size, *steps(20))))
        for name, plan in {
            "20, 2 workers": [(20, 2)],
            "10 + 10, 0 workers": [(10, 0), (20, 0)],
            "5 + 5 + 10, 0 workers": [(5, 0), (10, 0), (20, 0)],
            "10 + 10, 2 workers": [(10, 2), (20, 2)],
            "5 + 5 + 10, 2, 0 and 2 workers": [(5, 2), (10, 0), (20, 2)],
        }.items():
            folder = root / f"{world_size} {name}"
            for until, num_workers in plan:
                rows = train(folder, world_size, *steps(until), *workers(num_workers))
                equal = sum(exact(row) == expected for row, expected in zip(rows, reference, strict=False))
            report(f"{world_size} processes, {name}", f"{equal} of 20 steps equal", equal == 20)


def same_numbers(root: Path) -> None:
    print("\nOther layouts against one process without accumulation, fp32, uneven labels: relative difference")
    for optimizer, (loss_limit, norm_limit) in family.limits.items():
        common = (*family.length, "--optimizer.name", optimizer)
        reference = train(root / optimizer, 1, *common, "--training.local_batch_size", "16")
        for world_size, accumulation in [(1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (4, 4)]:
            local = 16 // world_size // accumulation
            folder = root / f"{optimizer} {world_size} {accumulation}"
            rows = train(folder, world_size, *common, "--training.local_batch_size", str(local))
            assert len(rows) == len(reference) == 20
            loss, norm = (
                max(abs(row[key] / expected[key] - 1) for row, expected in zip(rows, reference, strict=True))
                for key in ("loss", "grad_norm")
            )
            same = all(
                row["batch_sha256"] == expected["batch_sha256"] for row, expected in zip(rows, reference, strict=True)
            )
            hashes = "equal" if same else "other"
            report(
                f"{optimizer}, {world_size} processes, accumulation {accumulation}, hashes {hashes}",
                f"loss {loss:.1e} norm {norm:.1e}",
                same and loss <= loss_limit and norm <= norm_limit,
            )


def other_layout(root: Path) -> None:
    print("\nSaved by 4 processes after 10 steps, continued by others: hashes of steps 11 to 20")
    expected = [row["batch_sha256"] for row in train(root / "whole", 4, *steps(20))]
    for world_size in (1, 2):
        folder = root / f"4 then {world_size}"
        train(folder, 4, *steps(10))
        found = [row["batch_sha256"] for row in train(folder, world_size, *steps(20))]
        report(
            f"4 processes, then {world_size}", f"{sum(map(str.__eq__, found, expected))} of 20 equal", found == expected
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="nanocoder", choices=FAMILIES)
    family = FAMILIES[parser.parse_args().family]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # where packs are made
        for number, table in enumerate((exact_resume, same_numbers, other_layout)):
            table(Path(folder) / str(number))
    sys.exit(bool(broken))
