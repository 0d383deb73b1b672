"""What a run says about itself: `metrics.jsonl` with a line for every step, the console's step line, TensorBoard.

Values stay on the device; every `log_freq` steps they are gathered, written and averaged over the window. Sums over
ranks are taken in rank order in fp64, so a value does not depend on how many steps were gathered with it.
"""

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from titan_loom.config import job_config
from titan_loom.distributed.process_group import from_rank0, sum_in_rank_order
from titan_loom.errors import RunError
from titan_loom.models.interface import Segment
from titan_loom.tools.device import peak_flops, peak_memory
from titan_loom.tools.logging import logger


class SegmentRecord(NamedTuple):
    """One optimizer step; nothing here has been read back from the device."""

    segment: Segment | None
    """The loops that it trained; None: all at once."""
    sums: Tensor
    """fp32 (3 + num_sources,), this rank's: cross-entropy, weighted z-loss, weighted z-loss of the routers,
    cross-entropy by source."""
    grad_norm: Tensor
    """fp32 scalar, global, before clipping."""
    spike: str | None
    """Why its update was not made; it is then the last segment of its step."""
    measured: dict[str, Tensor]
    """This rank's diagnostics by name, the same names on every rank; their means over ranks are written."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """A step on one batch as the trainer hands it over. Its losses are those of its last segment, which reads what the
    whole model computes."""

    step: int
    segments: list[SegmentRecord]
    source_counts: list[int]
    """Supervised tokens of the global batch by source."""
    tokens_seen: int
    source_tokens: dict[str, int]
    lr: dict[str, float]
    weight_decay: float
    num_loops: int
    flops: int
    """Of the global batch, forward and backward, every visit counted as often as it runs and is differentiated."""
    data_wait: float
    """Seconds this rank waited for its batch."""
    source_wait: dict[str, float]
    """Seconds that this rank's lanes spent reading each source for it, added up, also while the step before ran."""
    filtered: dict[str, dict[str, int]]
    """Documents dropped since the start of the run, by source and reason."""
    extra: dict[str, Any]


class MetricsProcessor:
    """Collects `StepRecord`s and writes them out in windows.

    Args:
        folder: the run's folder; `metrics.jsonl` there is cut back to `start_step`, whose steps will be taken again.
    """

    def __init__(
        self,
        config: job_config.Metrics,
        folder: Path,
        *,
        device: torch.device,
        source_names: list[str],
        total_steps: int,
        start_step: int,
    ):
        self.config = config
        self.folder = folder
        self.device = device
        self.source_names = source_names
        self.total_steps = total_steps
        self.peak_flops = peak_flops(device)
        self.records: list[StepRecord] = []
        self.seconds_per_step: float | None = None
        self.is_writer = dist.get_rank() == 0
        self.progress = None
        from_rank0(self._open, start_step)
        peak = f"{self.peak_flops:.3e}" if self.peak_flops else "unknown for this device, so mfu is n/a"
        logger.info(f"Peak FLOPS used for computing MFU: {peak}")
        self.reset_clock()

    def reset_clock(self) -> None:
        """Start the window's time now: what came before (a checkpoint, say) is not training."""
        self.window_start = time.perf_counter()

    def record(self, record: StepRecord) -> None:
        self.records.append(record)
        if self.progress is not None:
            self.progress.update(self.progress.task_ids[0], completed=record.step)

    def add_validation(self, losses: dict[str, float], num_tokens: int, seconds: float) -> None:
        """Put a validation of `num_tokens` tokens into the line of the newest step, and its time out of the window."""
        self.window_start += seconds
        step = self.records[-1].step
        self.records[-1].extra.update({f"validation/{name}": loss for name, loss in losses.items()})
        memory, memory_percent = peak_memory(self.device)
        logger.info(
            f"validate step: {step:2}  loss: {losses['loss']:7.4f}  memory: {memory:5.2f}GiB({memory_percent:.2f}%)  "
            f"tps: {round(num_tokens / seconds / dist.get_world_size()):,}"
        )
        if self.is_writer and self.tensorboard is not None:
            for name, loss in losses.items():
                self.tensorboard.add_scalar(f"validation_metrics/{name}", loss, step)

    def should_flush(self, step: int) -> bool:
        return step % self.config.log_freq == 0 or step == self.total_steps

    def flush(self) -> None:
        """Write out what was recorded. Called by all ranks together.

        Raises:
            RunError: on every rank, when rank 0 cannot write.
        """
        if not self.records:
            return
        segments = [segment for record in self.records for segment in record.segments]
        of_segments = sum_in_rank_order(torch.stack([segment.sums for segment in segments]))
        grad_norms = torch.stack([segment.grad_norm for segment in segments]).cpu()
        lengths = [len(record.segments) for record in self.records]
        by_record = list(zip(of_segments.split(lengths), grad_norms.split(lengths), strict=True))
        seconds = time.perf_counter() - self.window_start
        self.seconds_per_step = seconds / len(self.records)
        tokens = sum(sum(record.source_counts) for record in self.records)
        tps = tokens / seconds / dist.get_world_size()
        for record in self.records:
            record.extra.update(_means_over_ranks(record.segments[0].measured))
        rows = [self._row(record, *of_record, tps) for record, of_record in zip(self.records, by_record, strict=True)]
        # The window's means are those of the steps that were trained, when there are any.
        trained = [i for i, record in enumerate(self.records) if record.segments[-1].spike is None]
        trained = trained or list(range(len(self.records)))
        sums = torch.stack([by_record[i][0][-1] for i in trained]).sum(0).tolist()
        from_rank0(self._write, rows, [self.records[i] for i in trained], sums, tps, seconds)
        self.records.clear()
        self.reset_clock()

    def sync(self) -> None:
        """Make sure that what was flushed is on disk, as a checkpoint counts on it. Called by all ranks together."""
        from_rank0(self._fsync)

    def close(self) -> None:
        if self.progress is not None:
            self.progress.stop()
        if self.is_writer:
            for log in filter(None, (self.file, self.tensorboard)):
                with suppress(OSError):  # `flush` has said what could not be written
                    log.close()

    def _open(self, start_step: int) -> None:
        with self._needing_the_disk():
            _cut_back(self.folder / "metrics.jsonl", start_step)
            self.file = open(self.folder / "metrics.jsonl", "a")
            self.tensorboard = None
            if self.config.enable_tensorboard:
                from torch.utils.tensorboard import SummaryWriter  # slow to import

                self.tensorboard = SummaryWriter(self.folder / self.config.save_tb_folder, purge_step=start_step + 1)
        self.progress = _progress_bar(self.total_steps, start_step)

    def _write(self, rows: list[dict], *window: Any) -> None:
        with self._needing_the_disk():
            self.file.writelines(json.dumps(row) + "\n" for row in rows)
            self.file.flush()
            self._report_window(rows, *window)

    def _fsync(self) -> None:
        with self._needing_the_disk():
            os.fsync(self.file.fileno())

    @contextmanager
    def _needing_the_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(f"the metrics could not be written to {self.folder}: {error}") from error

    def _row(self, record: StepRecord, sums: Tensor, grad_norms: Tensor, tps: float) -> dict[str, Any]:
        """The line of a step; `sums`, (segments, 3 + num_sources), and `grad_norms`, (segments,), are global."""
        count = sum(record.source_counts)
        ce, z, router_z, *by_source = sums[-1].tolist()
        losses = {
            name: _finite(loss / n)
            for name, loss, n in zip(self.source_names, by_source, record.source_counts, strict=True)
            if n
        }
        of_segments = zip(record.segments, sums[:, 0].tolist(), grad_norms.tolist(), strict=True)
        segments = [
            {"loops": list(each.segment), "ce_loss": _finite(total / count), "grad_norm": _finite(norm)}
            for each, total, norm in of_segments
            if each.segment is not None
        ]
        return {
            "step": record.step,
            "total_steps": self.total_steps,
            "loss": _finite((ce + z + router_z) / count),
            "ce_loss": _finite(ce / count),
            "z_loss": _finite(z / count),
            "router_z_loss": _finite(router_z / count),
            "perplexity": _perplexity(ce / count),
            "source_loss": losses,
            "grad_norm": _finite(grad_norms[-1].item()),
            "segments": segments,
            "tokens_seen": record.tokens_seen,
            "source_tokens": record.source_tokens,
            "lr": record.lr,
            "weight_decay": record.weight_decay,
            "num_loops": record.num_loops,
            "flops": record.flops,
            "tps": round(tps, 2),
            "data_wait": round(record.data_wait, 6),
            "source_wait": {name: round(seconds, 6) for name, seconds in record.source_wait.items()},
            "filtered": record.filtered,
            "eta": round((self.total_steps - record.step) * self.seconds_per_step, 1),
            **({} if record.segments[-1].spike is None else {"spike": record.segments[-1].spike}),
            **{key: _finite(value) if isinstance(value, float) else value for key, value in record.extra.items()},
        }

    def _report_window(
        self, rows: list[dict], trained: list[StepRecord], sums: list[float], tps: float, seconds: float
    ) -> None:
        """The console line and the TensorBoard scalars: means over the window's `trained` steps, whose sums are `sums`,
        weighted by tokens."""
        last = rows[-1]
        tokens = sum(sum(record.source_counts) for record in trained)
        step, eta = last["step"], timedelta(seconds=round(last["eta"]))
        loss = sum(sums[:3]) / tokens
        grad_norm = sum(record.segments[-1].grad_norm.item() for record in trained) / len(trained)
        counts = [sum(record.source_counts[i] for record in trained) for i in range(len(self.source_names))]
        by_source = {name: total / n for name, total, n in zip(self.source_names, sums[3:], counts, strict=True) if n}
        data_share = 100 * sum(row["data_wait"] for row in rows) / seconds
        memory, memory_percent = peak_memory(self.device)
        loops = sum(row["num_loops"] for row in rows) / len(rows)
        tflops = sum(record.flops for record in self.records) / seconds / dist.get_world_size() / 1e12
        mfu = f"{100 * tflops * 1e12 / self.peak_flops:.2f}%" if self.peak_flops else "n/a"
        colour = _colours(self.config.disable_color_printing)
        logger.info(
            colour("red", f"step: {step:2}")
            + colour("green", f"  loss: {loss:8.5f}")
            + colour("yellow", f"  grad_norm: {grad_norm:7.4f}")
            + colour("cyan", f"  memory: {memory:5.2f}GiB({memory_percent:.2f}%)")
            + colour("blue", f"  tps: {round(tps):,}")
            + colour("cyan", f"  tflops: {tflops:,.2f}")
            + colour("magenta", f"  mfu: {mfu}")
            + f"  tokens: {last['tokens_seen']:,}"
            + f"  loops: {loops:.3g}"
            + "".join(f"  {name}: {value:.4f}" for name, value in by_source.items())
            + f"  data_wait: {data_share:.1f}%  eta: {eta}"
        )
        if self.tensorboard is not None:
            scalars = {
                "loss_metrics/global_avg_loss": loss,
                "loss_metrics/ce_loss": sums[0] / tokens,
                "loss_metrics/z_loss": sums[1] / tokens,
                "loss_metrics/router_z_loss": sums[2] / tokens,
                "grad_norm": grad_norm,
                "throughput(tps)": tps,
                "tflops": tflops,
                "time_metrics/end_to_end(s)": seconds / len(rows),
                "time_metrics/data_loading(s)": sum(row["data_wait"] for row in rows) / len(rows),
                "time_metrics/data_loading(%)": data_share,
                "memory/peak(GiB)": memory,
                "memory/peak(%)": memory_percent,
                "n_tokens_seen": last["tokens_seen"],
                "weight_decay": last["weight_decay"],
                "num_loops": loops,
            }
            if self.peak_flops:
                scalars["mfu(%)"] = 100 * tflops * 1e12 / self.peak_flops
            scalars |= {f"source_loss/{name}": value for name, value in by_source.items()}
            scalars |= {f"lr/{group}": value for group, value in last["lr"].items()}
            for name, value in scalars.items():
                self.tensorboard.add_scalar(name, value, step)
            for record in self.records:
                for name in (name for name, value in record.segments[0].measured.items() if value.ndim == 0):
                    self.tensorboard.add_scalar(name, record.extra[name], record.step)


def _means_over_ranks(values: dict[str, Tensor]) -> dict[str, Any]:
    """Plain numbers and lists; called by all ranks together."""
    if not values:
        return {}
    flat = sum_in_rank_order(torch.cat([value.flatten().float() for value in values.values()])) / dist.get_world_size()
    parts = flat.split([value.numel() for value in values.values()])
    return {name: part.view(value.shape).tolist() for (name, value), part in zip(values.items(), parts, strict=True)}


def _finite(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else None


def _perplexity(ce_loss: float) -> float | None:
    return _finite(math.exp(ce_loss)) if ce_loss < 700 else None


def _cut_back(path: Path, step: int) -> None:
    """Drop the lines after `step`, and one that a crash left half written; a rename, so that none is lost meanwhile.

    Lines that no run has written are left out with a warning: a log is no reason to stop a run.
    """
    if not path.exists():
        return
    lines = path.read_bytes().split(b"\n")[:-1]
    steps = [_step_of(line) for line in lines]
    if damaged := steps.count(None):
        logger.warning(f"{path}: left out {damaged} damaged line{'s' if damaged > 1 else ''} of {len(lines)}")
    kept = [line + b"\n" for line, found in zip(lines, steps, strict=True) if found is not None and found <= step]
    aside = path.with_suffix(".jsonl.writing")
    aside.write_bytes(b"".join(kept))
    aside.rename(path)


def _step_of(line: bytes) -> int | None:
    """The step of a line of `metrics.jsonl`; None when it is damaged."""
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    return row["step"] if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _progress_bar(total_steps: int, start_step: int) -> Progress | None:
    """A bar with the time left, on a terminal only."""
    console = Console()
    if not console.is_terminal:
        return None
    progress = Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(bar_width=None),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
    )
    progress.add_task("train", total=total_steps, completed=start_step)
    progress.start()
    return progress


def _colours(disabled: bool):
    codes = {"red": 31, "green": 32, "yellow": 33, "blue": 34, "magenta": 35, "cyan": 36}
    if disabled or not Console().is_terminal:
        return lambda name, text: text
    return lambda name, text: f"\033[{codes[name]}m{text}\033[39m"
