"""Lanes: independent token streams whose number belongs to the data, not to the machine.

A lane gives its rows of one step at a time, together with its state after them, so that any process can take over any
lane from what was last consumed. `LaneDataset` runs lanes in turn in whatever worker process they are dealt to.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from titan_loom.data.documents import Format
from titan_loom.data.mixing import Mixer
from titan_loom.data.readers import Shard
from titan_loom.data.rows import RowStream
from titan_loom.data.sequences import SequenceState, SequenceStream
from titan_loom.data.tokenizer import PAD_ID, Tokenizer
from titan_loom.data.tokens import TokenStream
from titan_loom.errors import UserError


@dataclass(frozen=True, kw_only=True)
class LaneSource:
    """A source as the lanes read it."""

    name: str
    shards: tuple[Shard, ...]
    form: Format
    encode_batch_size: int


@dataclass(frozen=True, kw_only=True)
class LanePlan:
    """What all lanes of a run have in common."""

    sources: tuple[LaneSource, ...]
    mixer: Mixer
    tokenizer: Tokenizer
    seed: int
    lanes: int
    window: int
    open_parts: int
    rows_per_lane: int
    seq_len: int


class LaneStep(NamedTuple):
    """One lane's rows of one step."""

    lane: int
    tokens: np.ndarray
    """(rows, seq_len + 1) int32; a row that is cut to n tokens has n + 1 of them, then padding."""

    num_tokens: np.ndarray
    """(rows,) int64: supervised tokens of each row."""

    sources: np.ndarray
    """(rows,) int64: number of the source, -1 for a row without tokens."""

    state: str
    """The lane after this step, as JSON."""


class Lane:
    """Lane `index` of the run, from `step` (or from a state of its own) on."""

    def __init__(self, plan: LanePlan, index: int, step: int = 0, state: str | None = None):
        self._plan = plan
        self._index = index
        saved = json.loads(state) if state else {"step": step, "sources": {}}
        self._step: int = saved["step"]
        self._streams = [
            _open_stream(plan, source, index, saved["sources"].get(source.name)) for source in plan.sources
        ]

    def next_step(self) -> LaneStep:
        plan = self._plan
        first = self._index * plan.rows_per_lane
        picks = plan.mixer.positions(self._step)[first : first + plan.rows_per_lane]
        tokens = np.full((plan.rows_per_lane, plan.seq_len + 1), PAD_ID, dtype=np.int32)
        for row, (source, num_tokens) in enumerate(picks):
            if num_tokens:
                tokens[row, : num_tokens + 1] = self._streams[source].read(num_tokens)
        self._step += 1
        sources, counts = np.array(picks, dtype=np.int64).T
        return LaneStep(self._index, tokens, counts, sources, self.state())

    def state(self) -> str:
        # Text, because plain objects that change in place are passed on wrongly between worker and trainer.
        streams = zip(self._plan.sources, self._streams, strict=True)
        return json.dumps({"step": self._step, "sources": {source.name: stream.state() for source, stream in streams}})


def _open_stream(plan: LanePlan, source: LaneSource, lane: int, state: SequenceState | None) -> SequenceStream:
    row_state, document, token = state or (None, 0, 0)
    rows = RowStream(
        source.shards,
        seed=plan.seed,
        source_name=source.name,
        lane=lane,
        lanes=plan.lanes,
        window=plan.window,
        open_parts=plan.open_parts,
        columns=source.form.columns + source.form.optional,
        state=row_state,
    )
    documents = TokenStream(
        rows,
        source.form,
        plan.tokenizer,
        encode_batch_size=source.encode_batch_size,
        source_name=source.name,
        first_document=document,
    )
    return SequenceStream(documents, (rows.state(), document, token))


class LaneDataset(IterableDataset):
    """Endless: lane after lane, step after step. In worker w of n, every n-th lane from w on, so that a loader which
    asks its workers in turn sees the lanes in order (their number must divide by n).

    Yields LaneStep, or the UserError that stopped a lane: raised in a worker it would arrive as a traceback.
    """

    def __init__(self, plan: LanePlan, lanes: range, step: int, states: dict[int, str]):
        super().__init__()
        self._plan = plan
        self._lanes = lanes
        self._start_step = step
        self._states = states

    def __iter__(self) -> Iterator[LaneStep | UserError]:
        worker = get_worker_info()
        mine = self._lanes if worker is None else self._lanes[worker.id :: worker.num_workers]
        try:
            lanes = [Lane(self._plan, lane, self._start_step, self._states.get(lane)) for lane in mine]
            while True:
                for lane in lanes:
                    yield lane.next_step()
        except UserError as error:
            yield error
