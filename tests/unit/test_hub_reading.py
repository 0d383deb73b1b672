import gzip
import io
import json
import random
import time

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.hub_server import FOREVER, fineweb_parts, stack_parts
from titan_loom.config.job_config import Source, Streaming
from titan_loom.data.readers import Shard, count_rows, open_rows
from titan_loom.data.retry import Access
from titan_loom.data.sources import list_parts
from titan_loom.errors import ReadError

REPO = "Owner/corpus"
ROWS = 400
QUICK = Streaming(read_timeout_seconds=0.3)


def access(streaming=QUICK) -> Access:
    return Access("web", streaming)


def list_part(**source):
    (part,) = list_parts("web", Source(**{"path": REPO, **source})).parts
    return part


@pytest.fixture
def part(hub):
    hub.commit(REPO, fineweb_parts(1, ROWS, seed=0, row_group_size=100))
    return list_part()


@pytest.fixture
def texts(hub, part):
    content = hub.repo(REPO).find("main").files[part.name].source
    return pq.read_table(io.BytesIO(content), columns=["text"]).column("text").to_pylist()


def read(part, start=0, stop=None, streaming=QUICK) -> list[str]:
    return [row["text"] for row in open_rows(Shard(part, 0, stop), start, ("text",), access(streaming))]


def test_rows_are_those_of_the_file(part, texts):
    assert read(part) == texts
    assert read(part, 250) == texts[250:]
    assert read(part, 90, 110) == texts[90:110]


def test_a_footer_is_fetched_once(hub, part):
    hub.forget_requests()
    size = hub.repo(REPO).find("main").files[part.name].size
    for start in (0, 100, 200):
        read(part, start)
        count_rows(part)
    assert not [record for record in hub.requests("resolve") if f"-{size - 1}" in record.range]


FAULTS = [
    {"do": "status", "status": 500},
    {"do": "status", "status": 429, "retry_after": 0},
    {"do": "status", "status": 408},
    {"do": "cut"},
    {"do": "stall"},
    {"do": "stall_body"},
    {"do": "slow"},
    {"do": "truncate"},
    {"do": "truncate", "at": 0.01},  # the range lies behind the end: status 416, which once was taken for final
    {"do": "ignore_range"},
    {"do": "wrong_bytes"},
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: "-".join(map(str, fault.values())))
def test_rows_are_those_of_the_file_whatever_happens(hub, part, texts, fault):
    injected = hub.fault("resolve", after=2, times=2, **fault)
    assert read(part) == texts
    assert injected.hits == 2


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: "-".join(map(str, fault.values())))
def test_a_fault_that_stays_ends_with_source_part_and_row(hub, part, fault):
    rows = open_rows(Shard(part), 0, ("text",), access(Streaming(read_timeout_seconds=0.5, failures_per_hour=3)))
    for _ in range(10):
        next(rows)
    hub.fault("resolve", times=FOREVER, **fault)
    with pytest.raises(ReadError) as raised:
        list(rows)
    assert str(raised.value).startswith(f"data.sources.web: {part.name}, row ")
    assert 10 <= raised.value.row < 200
    assert "failures_per_hour is 3" in str(raised.value)


def test_a_proxy_that_knows_no_ranges_is_named_soon_and_never_believed(hub, part):
    hub.fault("resolve", do="ignore_range", times=FOREVER)
    with pytest.raises(ReadError, match=r"has status 200 and range None, 8 times in a row"):
        read(part)


@pytest.mark.parametrize("fault", [{"do": "missing"}, {"do": "status", "status": 403}])
def test_definite_answers_are_not_asked_for_again(hub, part, fault):
    hub.forget_requests()
    hub.fault("resolve", times=FOREVER, **fault)
    with pytest.raises(ReadError, match=r"row 0 cannot be read: .*(404|403)"):
        read(part)
    assert hub.count("resolve") == 1


def test_a_file_that_is_damaged_is_named(hub):
    (content,) = fineweb_parts(1, ROWS, seed=0, row_group_size=100).values()
    hub.commit(REPO, {"a.parquet": content[:9000] + bytes(5000) + content[14000:]})
    with pytest.raises(ReadError, match=r"a\.parquet, row \d+ cannot be read: damaged data .* 8 times in a row"):
        read(list_part())


def test_retry_after_is_honoured(hub, part, texts):
    hub.fault("resolve", do="status", status=429, retry_after=1)
    started = time.monotonic()
    assert read(part) == texts
    assert time.monotonic() - started >= 1


def test_waiting_draws_from_nobodys_random_numbers(hub, part):
    hub.fault("resolve", do="status", times=3)
    before = random.getstate(), np.random.get_state()[1].tolist()
    read(part)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_a_read_that_lasts_is_named_while_it_lasts(hub, part, caplog):
    from tests.unit.data_corpus import row_stream

    hub.fault("resolve", do="stall", seconds=1.5)
    with caplog.at_level("WARNING", logger="titan_loom"):
        stream = row_stream((Shard(part),), access=access(Streaming(report_seconds=0.2)))
        next(stream)
    assert caplog.text.count(f"Rank 0: reading data.sources.web, {part.name}, for ") >= 2
    assert "data.sources.s," not in caplog.text


def test_only_the_needed_columns_are_read(hub):
    parts = stack_parts(1, ROWS, seed=0, row_group_size=ROWS)
    hub.commit(REPO, parts)
    part = list_part(format="repository")
    hub.forget_requests()
    rows = list(open_rows(Shard(part), 0, ("repo_path", "files.content"), access()))
    assert rows[0].keys() == {"repo_path", "files"} and rows[0]["files"][0].keys() == {"content"}
    assert hub.bytes_sent("resolve") < part.size / 2


def test_resuming_far_into_a_part_reads_little_of_it(hub):
    # What 200,000 rows in groups of 1,000 show in benchmarks/streaming_faults.py, in small.
    hub.commit(REPO, fineweb_parts(1, 4000, seed=0, row_group_size=100))
    part = list_part()
    hub.forget_requests()
    row = next(open_rows(Shard(part), 3650, ("text",), access()))
    assert row["text"].startswith("page 0-0-3650")
    assert hub.bytes_sent("resolve") < 0.05 * part.size


def test_resuming_in_a_large_row_group_reads_no_other_one_and_no_other_column(hub):
    hub.commit(REPO, fineweb_parts(1, 3000, seed=0, row_group_size=1000))
    part = list_part()
    columns = pq.ParquetFile(io.BytesIO(hub.repo(REPO).find("main").files[part.name].source)).metadata.row_group(2)
    text = columns.column(0)
    hub.forget_requests()
    next(open_rows(Shard(part), 2700, ("text",), access()))
    first = text.dictionary_page_offset or text.data_page_offset
    for record in hub.requests("resolve"):
        start, stop = map(int, record.range.removeprefix("bytes=").split("-"))
        assert first <= start and stop < first + text.total_compressed_size


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_json_lines_are_read_through_the_same_checks(hub, suffix):
    rows = [{"text": f"line {i} " + "x" * 100, "other": i} for i in range(2000)] + [{"other": 1}]
    content = "\n".join(map(json.dumps, rows)).encode()
    hub.commit(REPO, {f"a.{suffix}": gzip.compress(content) if suffix.endswith("gz") else content})
    part = list_part()
    hub.fault("resolve", do="cut", after=1)
    hub.fault("resolve", do="ignore_range", after=1)
    expected = [row.get("text") for row in rows]
    assert count_rows(part) == 2001
    assert read(part) == expected
    assert read(part, 1500, 1510) == expected[1500:1510]
    assert hub.count("tree") == 1
