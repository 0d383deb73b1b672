"""The endless row stream of one lane and one source: shards in an order drawn anew for each epoch, several open at
once, rows shuffled in windows.

Every row of the source comes exactly once per epoch over all lanes. The order is a pure function of (seed, source,
epoch, shard, window), so a position is a few integers and resuming re-reads at most one window per open shard. There
is no reservoir buffer: its contents could not be resumed.
"""

from collections.abc import Callable, Iterator
from dataclasses import InitVar, dataclass
from itertools import islice
from typing import Any

from titan_loom.data.readers import Row, Shard, open_rows
from titan_loom.data.retry import Access
from titan_loom.errors import UserError
from titan_loom.tools.random import permutation

RowState = tuple[int, int, int, tuple[tuple[int, int, int], ...]]
"""(epoch, shards of the epoch begun, whose turn, ((place in the epoch's shards, window, rows taken of it) per open
shard)). Lists, as JSON gives them, are accepted too."""


@dataclass(kw_only=True, eq=False)
class RowStream:
    """Iterator of (row, state before that row); a stream built with that state goes on with that very row.

    Raises UserError when the source has no rows at all.
    """

    shards: tuple[Shard, ...]
    """All shards of the source, the same for every lane."""

    seed: int
    source_name: str
    lane: int
    lanes: int
    """Place i of an epoch's order of shards belongs to lane i mod `lanes`."""

    window: int
    """Rows that are shuffled together."""

    open_parts: int
    """Shards read in turn, one row each."""

    columns: tuple[str, ...]
    texts: tuple[str, ...] = ()
    access: Access
    """What `open_rows` is asked for and by."""

    start: InitVar[RowState | None] = None
    """Where to go on; None is the start of epoch 0."""

    def __post_init__(self, start: RowState | None):
        self._empty_shards: set[int] = set()
        epoch, self._num_begun, self._turn, open_shards = start or (0, 0, 0, ())
        self._start_epoch(epoch)
        self._open = [self._open_shard(*position) for position in open_shards]

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def epochs_to_meet_all(self) -> int:
        """Whole epochs in which this lane is as good as certain to get every shard: one that has a place in one of n
        lanes, drawn anew each time, stays away from this lane for so many epochs with probability below 1e-9."""
        return 2 + 30 * (self.lanes - 1)

    def state(self) -> RowState:
        """The position of the next row."""
        positions = tuple((shard.place, shard.window, shard.taken) for shard in self._open)
        return self._epoch, self._num_begun, self._turn, positions

    def __iter__(self) -> Iterator[tuple[Row, RowState]]:
        return self

    def __next__(self) -> tuple[Row, RowState]:
        while True:
            while len(self._open) < self.open_parts and self._num_begun < len(self._order):
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
        if len(self._empty_shards) == len(self.shards):
            raise UserError(f"data.sources.{self.source_name}.path holds no rows")
        self._epoch = epoch
        # With fewer shards than lanes there are places without a shard, so that every lane has its turn in some epoch.
        num_places = max(len(self.shards), self.lanes)
        order = permutation(num_places, self.seed, "shards", self.source_name, epoch)
        self._order = [index for index in order[self.lane :: self.lanes].tolist() if index < len(self.shards)]

    def _open_next(self) -> "_OpenShard":
        self._num_begun += 1
        return self._open_shard(self._num_begun - 1, 0, 0)

    def _open_shard(self, place: int, window: int, taken: int) -> "_OpenShard":
        index = self._order[place]
        purpose = (self.seed, "rows", self.source_name, self._epoch, index)
        rows = open_rows(self.shards[index], window * self.window, self.columns, self.access, self.texts)
        return _OpenShard(
            place,
            window,
            taken,
            self._watched(rows, self.shards[index].part.name),
            self.window,
            lambda window, length: permutation(length, *purpose, window),
        )

    def _watched(self, rows: Iterator[Row], part: str) -> Iterator[list[Row]]:
        """`rows` by windows, each read under the eyes of `access`."""
        while True:
            with self.access.watch(part):
                window = list(islice(rows, self.window))
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


@dataclass(eq=False)
class _OpenShard:
    """One shard being read, window by window; `window` and `taken` say where the next row is."""

    place: int
    window: int
    taken: int
    windows: Iterator[list[Row]]
    window_size: int
    order: Callable[[int, int], Any]
    shuffled: list[Row | None] | None = None

    def take(self) -> Row | None:
        """The next row; None at the end of the shard."""
        if self.shuffled is None:
            rows = next(self.windows)
            self.shuffled = [rows[i] for i in self.order(self.window, len(rows))]
        if self.taken == len(self.shuffled):
            return None
        row, self.shuffled[self.taken] = self.shuffled[self.taken], None
        self.taken += 1
        if self.taken == self.window_size:
            self.window, self.taken, self.shuffled = self.window + 1, 0, None
        return row
