"""`titan-loom report RUN ...`: what runs have learned and what their loops do, as a table and as pictures.

All of it comes from `metrics.jsonl` and `config.toml`. Runs are compared at the number of tokens that all of them have
trained on, by their cross-entropy: what is added to the loss beside it may differ between runs.
"""

import argparse
import json
import math
import os
import re
import statistics
import tomllib
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.table import Table

from titan_loom.config.decoding import leaves
from titan_loom.errors import UserError
from titan_loom.tools.logging import logger

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WINDOW = 0.05
"""Share of the tokens, the last ones, over whose steps a training loss is averaged."""

PANELS_IN_A_ROW = 3


class Run(NamedTuple):
    """A run's folder as it was read."""

    name: str
    config: dict[str, Any]
    """By dotted key."""
    rows: list[dict[str, Any]]
    """The lines of its metrics."""

    @property
    def tokens(self) -> int:
        return self.rows[-1]["tokens_seen"]

    def flops(self) -> list[int] | None:
        """What was spent up to the end of each step; None when the metrics do not tell."""
        if self.rows[0]["step"] != 1 or any("flops" not in row for row in self.rows):
            return None
        return list(accumulate(row["flops"] for row in self.rows))

    def newest(self, name: str, tokens: int) -> dict[str, Any] | None:
        """The last line with a value of `name` among those of the first `tokens` tokens."""
        rows = (row for row in reversed(self.rows) if row["tokens_seen"] <= tokens and row.get(name) is not None)
        return next(rows, None)

    def loss_at(self, tokens: int) -> float | None:
        """Mean cross-entropy over the steps that were trained in the last `WINDOW` of the first `tokens` tokens."""
        rows = [row for row in self.rows if row["tokens_seen"] <= tokens and "spike" not in row]
        recent = [row for row in rows if row["tokens_seen"] > (1 - WINDOW) * tokens] or rows[-1:]
        return statistics.fmean(row["ce_loss"] for row in recent) if recent else None


def main(argv: list[str]) -> None:
    """Print the table and write the pictures. Raises UserError for what is no run's folder."""
    parser = argparse.ArgumentParser(prog="titan-loom report", description=__doc__, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run (job.dump_folder)")
    parser.add_argument("--out", type=Path, help="folder of the pictures (default: `report` in that of the first run)")
    args = parser.parse_args(argv)
    if find_spec("matplotlib") is None:
        raise UserError("the pictures of a report need matplotlib: pip install 'titan-loom[report]'")
    runs = read_runs(args.runs)
    Console().print(summary(runs))
    for sentence in differences(runs):
        print(sentence)
    out = args.out or args.runs[0] / "report"
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, figure in draw(runs).items():
            figure.savefig(out / name, dpi=150)
            print(out / name)
    except OSError as error:
        raise UserError(f"--out is {str(out)!r}; it must be a folder that can be written to: {error}") from error


def read_runs(paths: list[Path]) -> list[Run]:
    """The runs at `paths`, each once, named as far as it takes to tell them apart. Raises UserError."""
    folders = list(dict.fromkeys(path.resolve() for path in paths))
    common = os.path.commonpath([folder.parent for folder in folders])
    return [_read_run(folder, str(folder.relative_to(common))) for folder in folders]


def _read_run(folder: Path, name: str) -> Run:
    try:
        config = tomllib.loads((folder / "config.toml").read_text())
        rows = read_metrics(folder / "metrics.jsonl")
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} is not the folder of a run: {error}") from error
    if not rows:
        raise UserError(f"{folder} is the folder of a run that has not taken a step")
    return Run(name, dict(leaves(config)), rows)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`, of damaged ones only a warning."""
    rows = []
    for number, line in enumerate(path.read_text().split("\n")[:-1], 1):  # what follows the last one is being written
        try:
            rows.append(json.loads(line))
        except ValueError:
            logger.warning(f"{path}: left out line {number}, which is damaged")
    return rows


def common_tokens(runs: list[Run]) -> int:
    """The tokens that every run has trained on."""
    return min(run.tokens for run in runs)


def summary(runs: list[Run]) -> Table:
    """A line for each run: its length, and where it stood at the tokens that all have trained on."""
    tokens = common_tokens(runs)
    table = Table("run", "steps", "tokens", "loss", "validation loss", "FLOPs", title=f"at {tokens:,} tokens")
    for run in runs:
        validated, flops = run.newest("validation/loss", tokens), run.flops()
        spent = [spent for row, spent in zip(run.rows, flops or [], strict=False) if row["tokens_seen"] <= tokens]
        validation = "" if validated is None else f"{validated['validation/loss']:.4f}"
        if validated is not None and validated["tokens_seen"] != tokens:
            validation += f" (at {validated['tokens_seen']:,})"
        table.add_row(
            run.name,
            f"{run.rows[-1]['step']:,}",
            f"{run.tokens:,}",
            "" if (loss := run.loss_at(tokens)) is None else f"{loss:.4f}",
            validation,
            f"{spent[-1]:.3e}" if spent else "",
        )
    return table


def differences(runs: list[Run]) -> Iterator[str]:
    """A sentence for each configuration key, those of `[job]` aside, that is not the same in all runs."""
    for key in dict.fromkeys(key for run in runs for key in run.config):
        found: dict[str, list[str]] = {}
        for run in runs:
            found.setdefault(json.dumps(run.config[key]) if key in run.config else "not set", []).append(run.name)
        if len(found) > 1 and not key.startswith("job."):
            yield f"{key} is " + " and ".join(f"{value} in {', '.join(names)}" for value, names in found.items()) + "."


def draw(runs: list[Run]) -> dict[str, "Figure"]:
    """The pictures by file name: `loss.png`; `loops.png` and `weave-<run>.png` where diagnostics were on."""
    figures = {"loss.png": _draw_loss(runs)}
    tokens = common_tokens(runs)
    diagnosed = {run.name: row for run in runs if (row := run.newest("loop/1/loss", tokens))}
    if diagnosed:
        figures["loops.png"] = _draw_loops(diagnosed)
    for run in runs:
        if row := run.newest("expert/distinct", run.tokens):
            figures[f"weave-{run.name.replace('/', '-')}.png"] = _draw_weave(run.name, row)
    return figures


def _draw_loss(runs: list[Run]) -> "Figure":
    """Cross-entropy against tokens and, where all metrics tell them, FLOPs."""
    flops = [run.flops() for run in runs]
    has_flops = all(spent is not None for spent in flops)
    panels = _panels(2 if has_flops else 1)
    for i, run in enumerate(runs):
        tokens = [row["tokens_seen"] for row in run.rows]
        for axes, amounts in zip(panels, (tokens, flops[i]), strict=False):
            axes.plot(amounts, _numbers(row["ce_loss"] for row in run.rows), f"C{i}", linewidth=0.8, label=run.name)
            validated = [
                (x, row["validation/loss"])
                for x, row in zip(amounts, run.rows, strict=True)
                if "validation/loss" in row
            ]
            if validated:
                axes.plot(*zip(*validated, strict=True), f"C{i}o--", label=f"{run.name}, validation")
    for axes, unit in zip(panels, ("tokens", "FLOPs"), strict=False):
        _label(axes, unit, "cross-entropy in nats")
    return panels[0].figure


def _draw_loops(diagnosed: dict[str, dict[str, Any]]) -> "Figure":
    """What is read out after each loop and how far it turns the stream, in the newest step that tells."""
    losses, angles = panels = _panels(2)
    for name, row in diagnosed.items():
        for axes, value in ((losses, "loss"), (angles, "angle")):
            found = _numbered(row, f"loop/*/{value}")
            axes.plot(list(found), _numbers(found.values()), "o-", label=f"{name}, step {row['step']:,}")
            axes.xaxis.get_major_locator().set_params(integer=True)
    _label(losses, "loop", "cross-entropy in nats, read out after the loop")
    _label(angles, "loop", "degrees from the state before the loop")
    return panels[0].figure


def _draw_weave(name: str, row: dict[str, Any]) -> "Figure":
    """Experts as warp, loops as weft, a panel for each layer; beside them, means over the layers."""
    num_layers = len(_numbered(row, "expert/loop/1/layer/*/load"))
    layers = [_numbered(row, f"expert/loop/*/layer/{layer}/load") for layer in range(num_layers)]
    num_loops, num_experts = len(layers[0]), len(layers[0][1])
    *panels, beside = _panels(num_layers + 1, width=2 + 0.14 * num_experts, height=1.6 + 0.22 * num_loops)
    most = max(share for loads in layers for load in loads.values() for share in load)
    for layer, (axes, loads) in enumerate(zip(panels, layers, strict=True)):
        image = axes.imshow(
            list(loads.values()),
            cmap="cividis",
            vmin=0,
            vmax=most,
            aspect="auto",
            extent=(-0.5, num_experts - 0.5, num_loops + 0.5, 0.5),
        )
        axes.set(title=f"layer {layer}", xlabel="expert", ylabel="loop", yticks=list(loads))
        for edge in range(1, num_experts):  # the threads
            axes.axvline(edge - 0.5, color="white", linewidth=0.8)
    overlaps = _numbered(row, "expert/loop/*/overlap")
    lines = ["experts of a token", f"all loops: {row['expert/distinct']:.2f} of {num_experts}"]
    lines += [f"loops {loop - 1} and {loop}: {shared:.2f} in common" for loop, shared in overlaps.items()]
    beside.text(0, 0.5, "\n".join(lines), va="center", fontsize="small")
    beside.axis("off")
    beside.figure.colorbar(image, ax=beside, label="share of choices", location="left")
    beside.figure.suptitle(f"{name}, step {row['step']:,}")
    return beside.figure


def _panels(count: int, width: float = 6.0, height: float = 4.0) -> list["Axes"]:
    """So many axes of one new figure; sizes in inches."""
    from matplotlib.figure import Figure

    columns = min(count, PANELS_IN_A_ROW)
    lines = -(-count // columns)
    figure = Figure((width * columns, height * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).flatten().tolist()
    for unused in axes[count:]:
        unused.remove()
    return axes[:count]


def _label(axes: "Axes", x: str, y: str) -> None:
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    axes.legend()


def _numbered(row: dict[str, Any], name: str) -> dict[int, Any]:
    """The values of `name` in `row` by the number that stands for its `*`, ascending."""
    pattern = re.compile(name.replace("*", r"(\d+)"))
    found = {int(match[1]): value for key, value in row.items() if (match := pattern.fullmatch(key))}
    return dict(sorted(found.items()))


def _numbers(values: Iterable[float | None]) -> list[float]:
    """What was not finite, and so is null in the metrics, leaves a gap."""
    return [math.nan if value is None else value for value in values]
