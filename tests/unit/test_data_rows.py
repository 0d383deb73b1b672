from collections import Counter
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.data_corpus import memory_parts, memory_text, row_stream, rows_of_epoch, shards_of, write_parts
from titan_loom.data.readers import Shard
from titan_loom.data.source_reader import SourceReader
from titan_loom.errors import UserError


def texts(rows):
    return [row["text"] for row in rows]


def epoch_of_all_lanes(shards, lanes, epoch, **options):
    return [texts(rows_of_epoch(row_stream(shards, lane, lanes, **options), epoch)) for lane in range(lanes)]


@pytest.mark.parametrize("rows", [[11], [5, 0, 9, 1], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [0, 0, 1]])
@pytest.mark.parametrize("lanes", [1, 4])
def test_every_row_comes_exactly_once_per_epoch(tmp_path, rows, lanes):
    expected = Counter(write_parts(tmp_path, rows))
    shards = shards_of(tmp_path, lanes)
    for window, open_parts in [(1, 1), (4, 2), (100, 3)]:
        for epoch in (0, 2):
            found = epoch_of_all_lanes(shards, lanes, epoch, window=window, open_parts=open_parts)
            assert Counter(text for lane in found for text in lane) == expected


def memory_rows(counts):
    return tuple(map(Shard, memory_parts(counts).parts))


@settings(max_examples=150, deadline=None)
@given(
    counts=st.lists(st.integers(0, 12), min_size=1, max_size=9).filter(any),
    lanes=st.integers(1, 5),
    window=st.integers(1, 6),
    open_parts=st.integers(1, 4),
    seed=st.integers(0, 3),
    stops=st.tuples(st.integers(0, 40), st.integers(0, 40)),
)
def test_resume_is_exact_twice_and_epochs_are_complete(counts, lanes, window, open_parts, seed, stops):
    shards = memory_rows(counts)
    options = {"window": window, "open_parts": open_parts, "seed": seed}
    expected = [memory_text(part, row) for part, count in enumerate(counts) for row in range(count)]
    found = [text for lane in epoch_of_all_lanes(shards, lanes, 0, **options) for text in lane]
    assert sorted(found) == sorted(expected)

    whole = texts(row for row, _ in islice(row_stream(shards, 0, lanes, **options), sum(stops) + 10))
    stream, resumed = row_stream(shards, 0, lanes, **options), []
    for stop in (*stops, 10):
        resumed += texts(row for row, _ in islice(stream, stop))
        stream = row_stream(shards, 0, lanes, **options, state=stream.state())
    assert resumed == whole


def test_the_state_before_a_row_gives_that_row_again(tmp_path):
    write_parts(tmp_path, [9, 0, 5, 7])
    shards = shards_of(tmp_path, 2)
    stream = row_stream(shards, 1, 2)
    history = list(islice(stream, 40))
    for number, (_, state) in enumerate(history):
        again = list(islice(row_stream(shards, 1, 2, state=state), 40 - number))
        assert texts(row for row, _ in again) == texts(row for row, _ in history[number:])
        assert [s for _, s in again] == [s for _, s in history[number:]]


def test_the_order_changes_with_the_epoch_the_seed_and_the_source():
    shards = memory_rows([10, 10, 10, 10])
    orders = [
        tuple(texts(rows_of_epoch(row_stream(shards, **options), epoch)))
        for epoch in (0, 1, 2)
        for options in ({}, {"seed": 1}, {"name": "t"})
    ]
    assert len(set(orders)) == 9
    assert orders[0] == tuple(texts(rows_of_epoch(row_stream(shards), 0)))


def test_open_parts_are_read_in_turn():
    shards = memory_rows([8, 8, 8, 8])
    parts = [row["text"][0] for row, _ in islice(row_stream(shards, open_parts=2), 16)]
    assert parts == parts[:2] * 8 and parts[0] != parts[1]


def test_rows_do_not_leave_their_window():
    rows = texts(rows_of_epoch(row_stream(memory_rows([20]), window=5), 0))
    numbers = [int(text.split()[0].split(":")[1]) for text in rows]
    assert [sorted(numbers[i : i + 5]) for i in range(0, 20, 5)] == [list(range(i, i + 5)) for i in range(0, 20, 5)]
    assert numbers != list(range(20))


def test_a_resume_reads_from_the_window_on_not_from_the_start(monkeypatch):
    shards = memory_rows([1000])
    stream = row_stream(shards, window=10)
    list(islice(stream, 905))
    starts, rows = [], SourceReader.rows
    monkeypatch.setattr(
        SourceReader, "rows", lambda self, shard, start: (starts.append(start), rows(self, shard, start))[1]
    )
    next(row_stream(shards, window=10, state=stream.state()))
    assert starts == [900]


def test_a_lane_enters_its_next_epoch_without_the_others():
    shards = memory_rows([1, 1, 30])
    epochs = [max(state[0] for _, state in islice(row_stream(shards, lane, 2), 20)) for lane in range(2)]
    assert max(epochs) >= 2


def test_a_source_without_any_row_is_an_error_and_not_a_hang():
    for shards in (memory_rows([0, 0, 0]), ()):
        with pytest.raises(UserError, match=r"data\.sources\.s\.path holds no rows"):
            next(row_stream(shards, 1, 2))
