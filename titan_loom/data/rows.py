"""The endless row stream of one lane and one source: shards in an order drawn anew for each epoch, several open at
once, rows shuffled in windows.

Every row of the source comes exactly once per epoch over all lanes. The order is a pure function of (seed, source,
epoch, shard, window), so a position is a few integers and resuming re-reads at most one window per open shard. There
is no reservoir buffer: its contents could not be resumed.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from titan_loom.config.job_config import Streaming
from titan_loom.data.readers import Row, Shard, open_rows
from titan_loom.data.retry import Access
from titan_loom.errors import UserError
from titan_loom.tools.random import permutation

RowState = tuple[int, int, int, tuple[tuple[int, int, int], ...]]
"""(epoch, shards of the epoch begun, whose turn, ((place in the epoch's shards, window, rows taken of it) per open
shard)). Lists, as JSON gives them, are accepted too."""


class RowStream:
    """Iterator of (row, state before that row); a stream built with that state goes on with that very row.

    Args:
        shards: all shards of the source, the same for every lane.
        lane, lanes: place i of an epoch's order of shards belongs to lane i mod `lanes`.
        window: rows that are shuffled together.
        open_parts: shards read in turn, one row each.
        columns, access, texts: what `open_rows` is asked for and by.
        state: where to go on; None is the start of epoch 0.

    Raises UserError when the source has no rows at all.
    """

    def __init__(
        self,
        shards: tuple[Shard, ...],
        *,
        seed: int,
        source_name: str,
        lane: int,
        lanes: int,
        window: int,
        open_parts: int,
        columns: tuple[str, ...],
        access: Access | None = None,
        texts: tuple[str, ...] = (),
        state: RowState | None = None,
    ):
        self._shards = shards
        self._seed = seed
        self._source_name = source_name
        self._lane = lane
        self._lanes = lanes
        self._window = window
        self._open_parts = open_parts
        self._columns = columns
        self._access = access or Access(source_name, Streaming())
        self._texts = texts
        self._empty_shards: set[int] = set()
        epoch, self._num_begun, self._turn, open_shards = state or (0, 0, 0, ())
        self._start_epoch(epoch)
        self._open = [self._open_shard(*position) for position in open_shards]

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def epochs_to_meet_all(self) -> int:
        """Whole epochs in which this lane is as good as certain to get every shard: one that has a place in one of n
        lanes, drawn anew each time, stays away from this lane for so many epochs with probability below 1e-9."""
        return 2 + 30 * (self._lanes - 1)

    def state(self) -> RowState:
        """The position of the next row."""
        positions = tuple((shard.place, shard.window, shard.taken) for shard in self._open)
        return self._epoch, self._num_begun, self._turn, positions

    def __iter__(self) -> Iterator[tuple[Row, RowState]]:
        return self

    def __next__(self) -> tuple[Row, RowState]:
        while True:
            while len(self._open) < self._open_parts and self._num_begun < len(self._order):
                self._open.append(self._open_next())
            if not self._open:
                self._num_begun = self._turn = 0
                self._start_epoch(self._epoch + 1)
                continue
            shard, state = self._open[self._turn], self.state()
            if (row := shard.take()) is not None:
                self._turn = (self._turn + 1) % len(self._open)
                return row, state
            self._close(shard)

    def _start_epoch(self, epoch: int) -> None:
        if len(self._empty_shards) == len(self._shards):
            raise UserError(f"data.sources.{self._source_name}.path holds no rows")
        self._epoch = epoch
        # With fewer shards than lanes there are places without a shard, so that every lane has its turn in some epoch.
        num_places = max(len(self._shards), self._lanes)
        order = permutation(num_places, self._seed, "shards", self._source_name, epoch)
        self._order = [index for index in order[self._lane :: self._lanes].tolist() if index < len(self._shards)]

    def _open_next(self) -> "_OpenShard":
        self._num_begun += 1
        return self._open_shard(self._num_begun - 1, 0, 0)

    def _open_shard(self, place: int, window: int, taken: int) -> "_OpenShard":
        index = self._order[place]
        purpose = (self._seed, "rows", self._source_name, self._epoch, index)
        rows = open_rows(self._shards[index], window * self._window, self._columns, self._access, self._texts)
        return _OpenShard(
            place,
            window,
            taken,
            self._watched(rows, self._shards[index].part.name),
            self._window,
            lambda window, length: permutation(length, *purpose, window),
        )

    def _watched(self, rows: Iterator[Row], part: str) -> Iterator[list[Row]]:
        """`rows` by windows, each read under the eyes of `access`."""
        while True:
            with self._access.watch(part):
                window = list(islice(rows, self._window))
            yield window

    def _close(self, shard: "_OpenShard") -> None:
        """Lets the next shard have the turn of one that has ended."""
        if shard.window == 0 and shard.taken == 0:
            self._empty_shards.add(self._order[shard.place])
        if self._num_begun < len(self._order):
            self._open[self._turn] = self._open_next()
        else:
            del self._open[self._turn]
            self._turn = self._turn % len(self._open) if self._open else 0


class _OpenShard:
    """One shard being read, window by window; `window` and `taken` say where the next row is."""

    def __init__(
        self,
        place: int,
        window: int,
        taken: int,
        windows: Iterator[list[Row]],
        window_size: int,
        order: Callable[[int, int], Any],
    ):
        self.place = place
        self.window = window
        self.taken = taken
        self._windows = windows
        self._window_size = window_size
        self._order = order
        self._shuffled: list[Row | None] | None = None

    def take(self) -> Row | None:
        """The next row; None at the end of the shard."""
        if self._shuffled is None:
            rows = next(self._windows)
            self._shuffled = [rows[i] for i in self._order(self.window, len(rows))]
        if self.taken == len(self._shuffled):
            return None
        row, self._shuffled[self.taken] = self._shuffled[self.taken], None
        self.taken += 1
        if self.taken == self._window_size:
            self.window, self.taken, self._shuffled = self.window + 1, 0, None
        return row
