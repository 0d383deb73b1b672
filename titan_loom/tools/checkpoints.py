"""`titan-loom checkpoint list | verify RUN`: what a run has saved, and whether it is still as it was written."""

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from titan_loom.errors import UserError
from titan_loom.tools.report import read_metrics
from titan_loom.training.checkpoint_files import complete_steps, find_damage, incomplete_steps, read_state

MIB = 2**20


def main(argv: list[str]) -> None:
    """Print a line for each checkpoint. Raises UserError when there is none, or when what is verified is damaged."""
    parser = argparse.ArgumentParser(prog="titan-loom checkpoint", description=__doc__, allow_abbrev=False)
    parser.add_argument("what", choices=("list", "verify"), help="`verify` reads all files and compares checksums")
    parser.add_argument("run", type=Path, help="folder of a run (job.dump_folder) or of its checkpoints")
    args = parser.parse_args(argv)
    folders = (args.run, args.run / "checkpoint")
    folder = next((folder for folder in folders if complete_steps(folder) or incomplete_steps(folder)), None)
    if folder is None:
        raise UserError(f"{args.run} holds no checkpoint")
    metrics = folder.parent / "metrics.jsonl"
    losses = {row["step"]: row.get("ce_loss") for row in read_metrics(metrics)} if metrics.exists() else {}
    table = Table("step", "tokens", "loss", "MiB", "state")
    damaged = []
    for step in complete_steps(folder):
        path = folder / f"step-{step}"
        tokens, state = _examine(path, reads_files=args.what == "verify")
        damaged += [] if state in ("complete", "whole") else [path.name]
        loss = "" if losses.get(step) is None else f"{losses[step]:.4f}"
        table.add_row(str(step), tokens, loss, _size(path), state)
    for path in incomplete_steps(folder):
        table.add_row(path.name.removeprefix("step-"), "", "", _size(path), "incomplete")
    Console().print(table)
    if damaged:
        raise UserError(f"{folder} holds damaged checkpoints: {', '.join(damaged)}")


def _examine(path: Path, *, reads_files: bool) -> tuple[str, str]:
    """Tokens trained on, and the state that the complete checkpoint at `path` is in."""
    try:
        state = read_state(path, "choose another")
    except UserError as error:
        return "", str(error)
    damages = (find_damage(path / name, checksum) for name, checksum in state["files"].items()) if reads_files else ()
    return f"{state['tokens_seen']:,}", next(filter(None, damages), "whole" if reads_files else "complete")


def _size(path: Path) -> str:
    return f"{sum(file.stat().st_size for file in path.rglob('*') if file.is_file()) / MIB:,.1f}"
