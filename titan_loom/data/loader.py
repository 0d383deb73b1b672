"""Batches of a rank: its lanes' rows of one step, in lane order, with the lanes' states after them.

The global batch of a step does not depend on the number of ranks or workers. The states to save are those of the last
batch taken from the loader, never of what workers have read ahead; the loader's own state (bound to its workers) is
not used.
"""

import hashlib
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from titan_loom.config.job_config import Data, Dataloader, Training
from titan_loom.data.documents import get_format
from titan_loom.data.lanes import LaneDataset, LanePlan, LaneSource, LaneStep
from titan_loom.data.mixing import Mixer
from titan_loom.data.sources import list_parts
from titan_loom.data.tokenizer import PAD_ID, Tokenizer
from titan_loom.errors import UserError
from titan_loom.tools.logging import logger

IGNORED_LABEL = -100


@dataclass(frozen=True)
class Batch:
    """A rank's part of the global batch of one step."""

    inputs: torch.Tensor
    """(rows, seq_len) int64."""

    labels: torch.Tensor
    """(rows, seq_len) int64: the next token; -100 where there is none to learn."""

    sources: torch.Tensor
    """(rows,) int64: number of the source in order of declaration, -1 for an empty row."""

    lane_states: dict[int, str]
    """State of each of the rank's lanes after this batch."""


class LaneLoader:
    """Endless iterator over the batches of data-parallel rank `dp_rank` of `dp_degree`, which owns a contiguous run
    of lanes.

    Args:
        steps, total_tokens: length of the run; with `total_tokens` its last step is cut to meet them.
        start_step: steps already taken; each of the rank's lanes must then have a state in `lane_states`.

    Raises UserError for sources that cannot be read and for a lane without a state.
    """

    def __init__(
        self,
        data: Data,
        dataloader: Dataloader,
        tokenizer: Tokenizer,
        *,
        seed: int,
        seq_len: int,
        global_batch_size: int,
        steps: int,
        total_tokens: int | None,
        dp_rank: int,
        dp_degree: int,
        start_step: int = 0,
        lane_states: dict[int, str] | None = None,
    ):
        self.source_names = list(data.sources)
        lanes_per_rank = data.lanes // dp_degree
        self._lanes = range(dp_rank * lanes_per_rank, (dp_rank + 1) * lanes_per_rank)
        states = {lane: state for lane, state in (lane_states or {}).items() if lane in self._lanes}
        if start_step:
            _check_states(states, self._lanes, data.lanes, start_step)
        mixer = Mixer(
            [source.share for source in data.sources.values()],
            seq_len=seq_len,
            global_batch_size=global_batch_size,
            total_tokens=total_tokens,
            steps=steps,
            unit=data.mix_unit,
        )
        plan = LanePlan(
            sources=_lane_sources(data),
            mixer=mixer,
            tokenizer=tokenizer,
            seed=seed,
            lanes=data.lanes,
            window=data.window,
            open_parts=data.open_parts,
            rows_per_lane=global_batch_size // data.lanes,
            seq_len=seq_len,
        )
        self._pin_memory = dataloader.pin_memory and torch.cuda.is_available()
        self._items = _iterate(LaneDataset(plan, self._lanes, start_step, states), dataloader, len(self._lanes))

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        items = [self._next_item(lane) for lane in self._lanes]
        tokens = torch.from_numpy(np.concatenate([item.tokens for item in items])).long()
        num_tokens = torch.from_numpy(np.concatenate([item.num_tokens for item in items]))
        supervised = torch.arange(tokens.shape[1] - 1) < num_tokens[:, None]
        inputs = tokens[:, :-1].where(supervised, PAD_ID)
        labels = tokens[:, 1:].where(supervised, IGNORED_LABEL)
        sources = torch.from_numpy(np.concatenate([item.sources for item in items]))
        if self._pin_memory:
            inputs, labels, sources = inputs.pin_memory(), labels.pin_memory(), sources.pin_memory()
        return Batch(inputs, labels, sources, {item.lane: item.state for item in items})

    def close(self) -> None:
        """Stops the workers. The loader gives no more batches."""
        self._items = iter(())

    def _next_item(self, lane: int) -> LaneStep:
        item = next(self._items, None)
        if isinstance(item, UserError):
            raise item
        # After a worker has died the loader may end, or go on with the items of the others: never carry on from that.
        if item is None or item.lane != lane:
            raise RuntimeError(f"a data worker stopped: the next item should be of lane {lane}")
        return item


def _check_states(states: dict[int, str], lanes: range, num_lanes: int, start_step: int) -> None:
    for lane in lanes:
        if lane not in states:
            raise UserError(
                f"data.lanes = {num_lanes}: the checkpoint of step {start_step} holds no state of lane {lane}, "
                "and each lane needs one"
            )


def _lane_sources(data: Data) -> tuple[LaneSource, ...]:
    sources = []
    for name, source in data.sources.items():
        parts = list_parts(name, source)
        shards = parts.shards(data.lanes)
        ignored = f", {parts.num_ignored:,} other files ignored" if parts.num_ignored else ""
        logger.info(
            f"Data source {name}: {source.path} ({parts.kind}), {len(parts.parts):,} parts in {len(shards):,} shards "
            f"for {data.lanes} lanes{ignored}"
        )
        form = get_format(name, source.format)
        sources.append(LaneSource(name=name, shards=shards, form=form, encode_batch_size=source.encode_batch_size))
    return tuple(sources)


def _iterate(dataset: LaneDataset, dataloader: Dataloader, num_lanes: int) -> Iterator[LaneStep | UserError]:
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
        workers = {"prefetch_factor": steps_ahead, "worker_init_fn": _start_worker, "in_order": True}
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


def _start_worker(worker: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    # A launcher or a terminal signals the whole process group, but the trainer still needs its workers while it saves.
    # As a group of its own a worker gets signals from its trainer only, which may still terminate it.
    os.setpgid(0, 0)


def batch_digests(batch: Batch) -> list[bytes]:
    """SHA-256 of each row: inputs then labels as little-endian int64."""
    rows = torch.cat([batch.inputs, batch.labels], dim=1).cpu().numpy().astype("<i8")
    return [hashlib.sha256(row.tobytes()).digest() for row in rows]


def combine_digests(digests: Sequence[bytes]) -> str:
    """One hexadecimal hash of the global batch from the digests of all its rows, in lane order."""
    return hashlib.sha256(b"".join(digests)).hexdigest()


def data_fingerprint(data: Data, training: Training, seed: int, tokenizer: Tokenizer) -> dict[str, int | str | float]:
    """What the order of the data depends on: configuration keys (as `section.key`) with their values, and digests of
    the tokenizer and of each source's parts. Kept in checkpoints, so that a resume can say which of them was changed.

    Raises UserError as `list_parts` does. The length of the run is left out: a run may be extended.
    """
    fingerprint: dict[str, int | str | float] = {
        "debug.seed": seed,
        "training.global_batch_size": training.global_batch_size,
        "training.seq_len": training.seq_len,
        "data.lanes": data.lanes,
        "data.window": data.window,
        "data.open_parts": data.open_parts,
        "data.mix_unit": data.mix_unit,
        "data.sources": ", ".join(data.sources),
        "tokenizer": tokenizer.sha256,
    }
    for name, source in data.sources.items():
        key = f"data.sources.{name}"
        fingerprint |= {
            f"{key}.path": source.path,
            f"{key}.config": source.config or "",
            f"{key}.format": source.format,
            f"{key}.share": source.share,
            f"{key}.parts": list_parts(name, source).digest(),
        }
    return fingerprint
