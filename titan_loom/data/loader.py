"""Batches of a rank: its lanes' rows of one step, in lane order, with the lanes' states after them.

The global batch of a step does not depend on the number of ranks or workers. The states to save are those of the last
batch taken from the loader, never of what workers have read ahead; the loader's own state (bound to its workers) is
not used.
"""

import hashlib
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from titan_loom.config.job_config import Data, Dataloader, Training
from titan_loom.data.filters import Holdout
from titan_loom.data.lanes import LaneDataset, LanePlan, LaneStep
from titan_loom.data.mixing import Mixer
from titan_loom.data.packs import check_pack, open_pack
from titan_loom.data.retry import Access
from titan_loom.data.rows import Order
from titan_loom.data.source_reader import SourceReader
from titan_loom.data.sources import Parts, list_sources, source_settings
from titan_loom.data.tokenizer import Tokenizer
from titan_loom.data.workers import leave_when_closed
from titan_loom.errors import ReadError, UserError
from titan_loom.tools.logging import logger

SECONDS_TO_LEAVE = 1.0
"""For workers that are asked to leave; those that are still busy then are ended by force."""


@dataclass(frozen=True)
class Batch:
    """A rank's part of the global batch of one step."""

    inputs: torch.Tensor
    """(rows, seq_len) int64."""

    labels: torch.Tensor
    """(rows, seq_len) int64: the next token; `IGNORED_LABEL` for padding, which is where there is none to learn."""

    positions: torch.Tensor | None
    """(rows, seq_len) int64: position of each token in its document, of padding among itself. None when rows are cut
    from a stream of documents, whose ends the inputs show."""

    sources: torch.Tensor
    """(rows,) int64: number of the source in order of declaration, -1 for an empty row."""

    lane_states: dict[int, str]
    """State of each of the rank's lanes after this batch."""

    filtered: np.ndarray
    """(num_sources, num_reasons) int64: documents that the rank's lanes have dropped since the start of the run, for
    each of `filters.REASONS`."""

    read_seconds: dict[str, float]
    """Time that the rank's lanes spent reading each source for this batch, added up over lanes and workers."""


class LaneLoader:
    """Endless iterator over the batches of data-parallel rank `dp_rank` of `dp_degree`, which owns a contiguous run
    of lanes.

    Args:
        start_step: steps already taken; each of the rank's lanes must then have a state in `lane_states`.
        order: the keyword arguments of `build_plan`.

    Raises UserError for sources that cannot be read and for a lane without a state.
    """

    def __init__(
        self,
        data: Data,
        dataloader: Dataloader,
        tokenizer: Tokenizer,
        *,
        dp_rank: int,
        dp_degree: int,
        start_step: int = 0,
        lane_states: dict[int, str] | None = None,
        **order: Any,
    ):
        self.source_names = list(data.sources)
        lanes_per_rank = data.lanes // dp_degree
        self._lanes = range(dp_rank * lanes_per_rank, (dp_rank + 1) * lanes_per_rank)
        states = {lane: state for lane, state in (lane_states or {}).items() if lane in self._lanes}
        missing = [lane for lane in self._lanes if lane not in states]
        if start_step and missing:
            raise UserError(
                f"data.lanes = {data.lanes}: the checkpoint of step {start_step} holds no state of lane {missing[0]}, "
                "and each lane needs one"
            )
        plan = build_plan(data, tokenizer, **order)
        self._pin_memory = dataloader.pin_memory and torch.cuda.is_available()
        dataset = LaneDataset(plan, self._lanes, start_step, states)
        worker_end, lifeline = multiprocessing.Pipe(duplex=False)
        # Before multiprocessing waits for its children at the end of an interpreter that has not closed this.
        self._end_workers = Finalize(None, lifeline.close, exitpriority=0)
        start_worker = partial(_start_worker, worker_end, lifeline)
        self._items = _iterate(dataset, dataloader, len(self._lanes), start_worker)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        items = [self._next_item(lane) for lane in self._lanes]
        filtered = np.sum([item.filtered for item in items], axis=0)
        read_seconds = np.sum([item.read_seconds for item in items], axis=0).tolist()
        return Batch(
            self._tensor([item.inputs for item in items]),
            self._tensor([item.labels for item in items]),
            None if items[0].positions is None else self._tensor([item.positions for item in items]),
            self._tensor([item.sources for item in items]),
            {item.lane: item.state for item in items},
            filtered,
            dict(zip(self.source_names, read_seconds, strict=True)),
        )

    def _tensor(self, of_lanes: list[np.ndarray]) -> torch.Tensor:
        whole = torch.from_numpy(np.concatenate(of_lanes)).long()
        return whole.pin_memory() if self._pin_memory else whole

    def close(self) -> None:
        """Stops the workers, whatever they are doing. The loader gives no more batches."""
        # In a thread that may be left behind: asking takes a lock, which a worker that has ended may have kept.
        asking = threading.Thread(target=self._ask_workers_to_leave, daemon=True)
        asking.start()
        asking.join(SECONDS_TO_LEAVE)
        self._end_workers()
        asking.join(SECONDS_TO_LEAVE)

    def _ask_workers_to_leave(self) -> None:
        self._items = iter(())

    def _next_item(self, lane: int) -> LaneStep:
        item = next(self._items, None)
        if isinstance(item, UserError | ReadError):
            raise item
        # After a worker has died the loader may end, or go on with the items of the others: never carry on from that.
        if item is None or item.lane != lane:
            raise RuntimeError(f"a data worker stopped: the next item should be of lane {lane}")
        return item


class Fetch(threading.Thread):
    """`next(loader)` in a thread, so that a rank whose data is late can still be asked how it is doing.

    When it is no longer alive, one of `batch` and `error` is set.
    """

    def __init__(self, loader: LaneLoader):
        super().__init__(daemon=True)
        self._loader = loader
        self.batch: Batch | None = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.batch = next(self._loader)
        except Exception as error:
            self.error = error


def build_plan(
    data: Data,
    tokenizer: Tokenizer,
    *,
    seed: int,
    seq_len: int,
    global_batch_size: int,
    steps: int,
    total_tokens: int | None,
    holdout: bool = False,
    listing: dict[str, Parts] | None = None,
) -> LanePlan:
    """What the lanes of a run have in common.

    Args:
        steps, total_tokens: length of the run; with `total_tokens` its last step is cut to meet them.
        holdout: read the documents that are held out in place of the others.
        listing: what `list_sources` found, if it was called before: ranks share one.
    """
    listing = listing or list_sources(data)
    side = Holdout(data.holdout_percent, holdout)
    return LanePlan(
        sources=tuple(_open_source(data, name, side, listing[name]) for name in data.sources),
        mixer=Mixer(
            _stages(data),
            seq_len=seq_len,
            global_batch_size=global_batch_size,
            total_tokens=total_tokens,
            steps=steps,
            unit=data.mix_unit,
        ),
        tokenizer=tokenizer,
        order=Order(seed=seed, lanes=data.lanes, window=data.window, open_parts=data.open_parts),
        rows_per_lane=global_batch_size // data.lanes,
        seq_len=seq_len,
        packing=data.packing,
    )


def _stages(data: Data) -> list[tuple[int | None, list[float]]]:
    """Length and shares of each stage; without a curriculum the whole run is one."""
    if not data.stages:
        return [(None, [source.share for source in data.sources.values()])]
    return [(stage.tokens, [stage.shares.get(name, 0.0) for name in data.sources]) for stage in data.stages]


def _open_source(data: Data, name: str, holdout: Holdout, parts: Parts) -> SourceReader:
    source, access = data.sources[name], Access(name, data.streaming)
    of = "the holdout of " if holdout.inside else ""
    found = f"Data source {name}: {of}{source.path} ({parts.kind}),"
    if parts.kind == "pack":
        pack = open_pack(f"data.sources.{name}.path", parts.parts[0].path)
        logger.info(f"{found} {pack.num_documents:,} documents, {pack.num_tokens:,} tokens in {pack.path}")
        return SourceReader(name, source, access, holdout=holdout, pack=pack)
    shards = parts.shards(data.lanes)
    ignored = f", {parts.num_ignored:,} other files ignored" if parts.num_ignored else ""
    logger.info(f"{found} {len(parts.parts):,} parts in {len(shards):,} shards for {data.lanes} lanes{ignored}")
    return SourceReader(name, source, access, holdout=holdout, shards=shards)


def _iterate(
    dataset: LaneDataset, dataloader: Dataloader, num_lanes: int, start_worker: Callable[[int], None]
) -> Iterator[LaneStep | UserError | ReadError]:
    num_workers = min(dataloader.num_workers, num_lanes)
    while num_workers and num_lanes % num_workers:
        num_workers -= 1
    if num_workers != dataloader.num_workers:
        logger.info(
            f"Lowered training.dataloader.num_workers from {dataloader.num_workers} to {num_workers}, "
            f"a divisor of the {num_lanes} lanes of a rank"
        )
    workers: dict[str, Any] = {}
    if num_workers:
        steps_ahead = dataloader.prefetch_factor * (num_lanes // num_workers)
        workers = {"prefetch_factor": steps_ahead, "worker_init_fn": start_worker, "in_order": True}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata calls it itself.
        loader = StatefulDataLoader(
            dataset,
            batch_size=None,
            num_workers=num_workers,
            collate_fn=_identity,  # As numpy arrays items cross processes several times faster than as tensors.
            snapshot_every_n_steps=0,
            **workers,
        )
        return iter(loader)


def _identity(item: Any) -> Any:
    return item


def _start_worker(worker_end: Connection, trainer_end: Connection, worker: int) -> None:
    trainer_end.close()  # a fork's copy would keep it open
    leave_when_closed(worker_end)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    # A scheduler signals every process of the job: the trainer still needs its workers while it saves.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def batch_digests(batch: Batch) -> list[bytes]:
    """SHA-256 of each row: inputs, labels and, if the batch has them, positions as little-endian int64."""
    positions = [] if batch.positions is None else [batch.positions]
    rows = torch.cat([batch.inputs, batch.labels, *positions], dim=1).cpu().numpy().astype("<i8")
    return [hashlib.sha256(row.tobytes()).digest() for row in rows]


def combine_digests(digests: Sequence[bytes]) -> str:
    """One hexadecimal hash of the global batch from the digests of all its rows, in lane order."""
    return hashlib.sha256(b"".join(digests)).hexdigest()


def data_fingerprint(
    data: Data, training: Training, seed: int, tokenizer: Tokenizer, listing: dict[str, Parts] | None = None
) -> dict[str, Any]:
    """What the order of the data depends on: configuration keys (as `section.key`) with their values, and digests of
    the tokenizer and of each source's parts. Kept in checkpoints, so that a resume can say which of them was changed.

    Raises UserError as `list_parts` does, and for a pack of another tokenizer. The length of the run is left out: a run
    may be extended.
    """
    listing = listing or list_sources(data)
    keys = ("lanes", "window", "open_parts", "mix_unit", "packing", "holdout_percent")
    fingerprint: dict[str, Any] = {
        "debug.seed": seed,
        "training.global_batch_size": training.global_batch_size,
        "training.seq_len": training.seq_len,
        **{f"data.{key}": getattr(data, key) for key in keys},
        "data.stages": _describe_stages(data),
        "data.sources": ", ".join(data.sources),
        "tokenizer": tokenizer.sha256,
    }
    for name, source in data.sources.items():
        key = f"data.sources.{name}"
        parts = listing[name]
        if parts.kind == "pack":
            check_pack(f"{key}.path", open_pack(f"{key}.path", parts.parts[0].path), tokenizer)
        settings = source_settings(source) | {"share": source.share, "commit": parts.commit, "parts": parts.digest()}
        fingerprint |= {f"{key}.{name}": value for name, value in settings.items()}
    return fingerprint


def _describe_stages(data: Data) -> str:
    """The curriculum in a line, without the length of its last stage, which is the run's."""
    stages = [
        f"{'' if stage is data.stages[-1] else stage.tokens} "
        + ", ".join(f"{name} {stage.shares[name]}" for name in data.sources if stage.shares.get(name))
        for stage in data.stages
    ]
    return "; ".join(stages)
