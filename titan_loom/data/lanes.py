"""Lanes: independent token streams whose number belongs to the data, not to the machine.

A lane gives its rows of one step at a time, together with its state after them, so that any process can take over any
lane from what was last consumed. `LaneDataset` runs lanes in turn in whatever worker process they are dealt to.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from titan_loom.data.first_fit import FirstFitState, FirstFitStream
from titan_loom.data.mixing import Mixer
from titan_loom.data.rows import Order, RowStream
from titan_loom.data.sequences import SequenceState, SequenceStream
from titan_loom.data.source_reader import SourceReader
from titan_loom.data.tokenizer import PAD_ID, Tokenizer
from titan_loom.data.tokens import NO_COUNTS, Counts, read_pack, tokenise
from titan_loom.errors import ReadError, UserError

IGNORED_LABEL = -100


@dataclass(frozen=True, kw_only=True)
class LanePlan:
    """What all lanes of a run have in common."""

    sources: tuple[SourceReader, ...]
    mixer: Mixer
    tokenizer: Tokenizer
    order: Order
    rows_per_lane: int
    seq_len: int
    packing: Literal["stream", "first_fit"]


class LaneStep(NamedTuple):
    """One lane's rows of one step."""

    lane: int
    inputs: np.ndarray
    """(rows, seq_len) int32; `PAD_ID` behind the row's tokens."""

    labels: np.ndarray
    """(rows, seq_len) int32: the next token; `IGNORED_LABEL` for padding."""

    positions: np.ndarray | None
    """(rows, seq_len) int32: position in its chunk, of padding among itself. None when rows are cut from a stream."""

    sources: np.ndarray
    """(rows,) int64: number of the source, -1 for a row without tokens."""

    state: str
    """The lane after this step, as JSON."""

    filtered: np.ndarray
    """(num_sources, num_reasons) int64: documents that the lane has dropped since the start of the run."""

    read_seconds: np.ndarray
    """(num_sources,) float64: time that reading rows took in this step."""


class Lane:
    """Lane `index` of the run, from `step` (or from a state of its own) on."""

    def __init__(self, plan: LanePlan, index: int, step: int = 0, state: str | None = None):
        self._plan = plan
        self._index = index
        saved = json.loads(state) if state else {"step": step, "sources": {}, "filtered": {}}
        self._step: int = saved["step"]
        self._streams = {
            source.name: open_stream(
                plan, source, index, saved["sources"].get(source.name), saved["filtered"].get(source.name, NO_COUNTS)
            )
            for source in plan.sources
        }

    def next_step(self) -> LaneStep:
        plan, streams = self._plan, list(self._streams.values())
        first = self._index * plan.rows_per_lane
        picks = plan.mixer.positions(self._step)[first : first + plan.rows_per_lane]
        shape = plan.rows_per_lane, plan.seq_len
        inputs, labels = np.full(shape, PAD_ID, np.int32), np.full(shape, IGNORED_LABEL, np.int32)
        positions = np.zeros(shape, np.int32)
        read_before = self._read_seconds()
        for row, (source, num_tokens) in enumerate(picks):
            start = 0
            for chunk in streams[source].read_row(num_tokens) if num_tokens else ():
                stop = start + len(chunk) - 1
                inputs[row, start:stop], labels[row, start:stop] = chunk[:-1], chunk[1:]
                positions[row, start:stop] = np.arange(stop - start)
                start = stop
            positions[row, start:] = np.arange(plan.seq_len - start)
        self._step += 1
        return LaneStep(
            lane=self._index,
            inputs=inputs,
            labels=labels,
            positions=positions if plan.packing == "first_fit" else None,
            sources=np.array([source for source, _ in picks]),
            state=self.state(),
            filtered=np.array([stream.filtered for stream in streams], dtype=np.int64),
            read_seconds=self._read_seconds() - read_before,
        )

    def _read_seconds(self) -> np.ndarray:
        return np.array([source.access.seconds for source in self._plan.sources])

    def state(self) -> str:
        # Text, because plain objects that change in place are passed on wrongly between worker and trainer.
        positions = {name: stream.state() for name, stream in self._streams.items()}
        filtered = {name: stream.filtered for name, stream in self._streams.items()}
        return json.dumps({"step": self._step, "sources": positions, "filtered": filtered})


def open_stream(
    plan: LanePlan,
    source: SourceReader,
    lane: int,
    state: SequenceState | FirstFitState | None = None,
    filtered: Counts = NO_COUNTS,
) -> SequenceStream | FirstFitStream:
    """The rows of tokens of one source in one lane, from its start or from a state on."""
    row_state, document, *inside = state or (None, 0)
    if source.pack is not None:
        row_state = row_state or (0, 0)
        documents = read_pack(source, plan.order, lane, row_state)
    else:
        rows = RowStream(source, plan.order, lane, row_state)
        row_state = rows.state()
        documents = tokenise(rows, plan.tokenizer, document, filtered)
    if plan.packing == "first_fit":
        chunk, taken = inside or (0, [])
        return FirstFitStream(documents, (row_state, document, chunk, taken), filtered, seq_len=plan.seq_len)
    (token,) = inside or (0,)
    return SequenceStream(documents, (row_state, document, token), filtered)


class LaneDataset(IterableDataset):
    """Endless: lane after lane, step after step. In worker w of n, every n-th lane from w on, so that a loader which
    asks its workers in turn sees the lanes in order (their number must divide by n).

    Yields LaneStep, or the UserError or ReadError that stopped a lane: raised in a worker it would arrive as a
    traceback.
    """

    def __init__(self, plan: LanePlan, lanes: range, step: int, states: dict[int, str]):
        super().__init__()
        self._plan = plan
        self._lanes = lanes
        self._start_step = step
        self._states = states

    def __iter__(self) -> Iterator[LaneStep | UserError | ReadError]:
        worker = get_worker_info()
        mine = self._lanes if worker is None else self._lanes[worker.id :: worker.num_workers]
        try:
            lanes = [Lane(self._plan, lane, self._start_step, self._states.get(lane)) for lane in mine]
            while True:
                for lane in lanes:
                    yield lane.next_step()
        except (UserError, ReadError) as error:
            yield error
