"""The endless row stream of one lane and one source: shards in an order drawn anew for each epoch, several open at
once, rows shuffled in windows.

Every row of the source comes exactly once per epoch over all lanes. The order is a pure function of (seed, source,
epoch, shard, window), so a position is a few integers and resuming re-reads at most one window per open shard. There
is no reservoir buffer: its contents could not be resumed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from titan_loom.data.readers import Row
from titan_loom.data.source_reader import SourceReader
from titan_loom.errors import UserError
from titan_loom.tools.random import permutation

RowState = tuple[int, int, int, tuple[tuple[int, int, int], ...]]
"""(epoch, shards of the epoch begun, whose turn, ((place in the epoch's shards, window, rows taken of it) per open
shard)). Lists, as JSON gives them, are accepted too."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What the order of a source's rows depends on."""

    seed: int
    lanes: int
    """Place i of an epoch's order of shards belongs to lane i mod `lanes`."""

    window: int
    """Rows that are shuffled together."""

    open_parts: int
    """Shards read in turn, one row each."""


class RowStream:
    """Iterator of (row, state before that row); a stream built with that state goes on with that very row.

    Raises UserError when the source has no rows at all.
    """

    def __init__(self, source: SourceReader, order: Order, lane: int, state: RowState | None = None):
        self.source = source
        self._order = order
        self._lane = lane
        self._empty_shards: set[int] = set()
        epoch, self._num_begun, self._turn, open_shards = state or (0, 0, 0, ())
        self._start_epoch(epoch)
        self._open = [self._open_shard(*position) for position in open_shards]

    @property
    def epochs_to_meet_all(self) -> int:
        """Whole epochs in which this lane is as good as certain to get every shard: one that has a place in one of n
        lanes, drawn anew each time, stays away from this lane for so many epochs with probability below 1e-9."""
        return 2 + 30 * (self._order.lanes - 1)

    def state(self) -> RowState:
        """The position of the next row."""
        positions = tuple((shard.place, shard.window, shard.taken) for shard in self._open)
        return self.epoch, self._num_begun, self._turn, positions

    def __iter__(self) -> Iterator[tuple[Row, RowState]]:
        return self

    def __next__(self) -> tuple[Row, RowState]:
        while True:
            while len(self._open) < self._order.open_parts and self._num_begun < len(self._shards):
                self._open.append(self._open_next())
            if not self._open:
                self._num_begun = self._turn = 0
                self._start_epoch(self.epoch + 1)
                continue
            shard, state = self._open[self._turn], self.state()
            if (row := self._take(shard)) is not None:
                self._turn = (self._turn + 1) % len(self._open)
                return row, state
            self._close(shard)

    def _start_epoch(self, epoch: int) -> None:
        shards = self.source.shards
        if len(self._empty_shards) == len(shards):
            raise UserError(f"{self.source.key}.path holds no rows")
        self.epoch = epoch
        # With fewer shards than lanes there are places without a shard, so that every lane has its turn in some epoch.
        places = permutation(max(len(shards), self._order.lanes), self._order.seed, "shards", self.source.name, epoch)
        mine = places[self._lane :: self._order.lanes].tolist()
        self._shards = [index for index in mine if index < len(shards)]

    def _open_next(self) -> "_OpenShard":
        self._num_begun += 1
        return self._open_shard(self._num_begun - 1, 0, 0)

    def _open_shard(self, place: int, window: int, taken: int) -> "_OpenShard":
        return _OpenShard(place, window, taken, self._shuffled_windows(self._shards[place], window))

    def _shuffled_windows(self, index: int, window: int) -> Iterator[list[Row | None]]:
        """The windows of shard `index` from `window` on, each in its order; empty ones after its end."""
        shard, order, epoch = self.source.shards[index], self._order, self.epoch
        rows = self.source.rows(shard, window * order.window)
        while True:
            with self.source.access.watch(shard.part.name):
                read = list(islice(rows, order.window))
            shuffled = permutation(len(read), order.seed, "rows", self.source.name, epoch, index, window)
            yield [read[i] for i in shuffled]
            window += 1

    def _take(self, shard: "_OpenShard") -> Row | None:
        """The next row; None at the end of the shard."""
        if shard.rows is None:
            shard.rows = next(shard.windows)
        if shard.taken == len(shard.rows):
            return None
        row, shard.rows[shard.taken] = shard.rows[shard.taken], None
        shard.taken += 1
        if shard.taken == self._order.window:
            shard.window, shard.taken, shard.rows = shard.window + 1, 0, None
        return row

    def _close(self, shard: "_OpenShard") -> None:
        """Lets the next shard have the turn of one that has ended."""
        if shard.window == 0 and shard.taken == 0:
            self._empty_shards.add(self._shards[shard.place])
        if self._num_begun < len(self._shards):
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
    windows: Iterator[list[Row | None]]
    rows: list[Row | None] | None = None
    """Of the window, in their order; a row that was given is let go."""
