import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from titan_loom.config import Data, Dataloader, Source
from titan_loom.config.job_config import Streaming
from titan_loom.data.filters import REASONS, count_by_reason
from titan_loom.data.loader import LaneLoader
from titan_loom.data.retry import Access
from titan_loom.data.source_reader import SourceReader
from titan_loom.data.sources import list_parts
from titan_loom.data.tokenizer import load_tokenizer
from titan_loom.errors import UserError

FILES = [
    {"file_path": "a.py", "content": "x" * 10, "language": "Python", "license": "MIT"},
    {"file_path": "b.rs", "content": "y" * 20, "language": "Rust", "license": "GPL-3.0"},
    {"file_path": "c.rs", "content": "z" * 30, "language": None, "license": None},
    {"file_path": "d", "content": "w" * 40, "language": None, "license": "mit"},
]
ROW = {"repo_path": "me/tool", "files": FILES, "licenses": ["MIT", "Apache-2.0"]}


def keep(form="repository", row=ROW, **keys):
    """First letters of the contents that are kept, and how many are dropped by reason."""
    filtered = [0] * len(REASONS)
    reader = SourceReader("s", Source(format=form, **keys), Access("s", Streaming()))
    letters = "".join(document.text.rstrip()[-1] for _, document in reader.documents(row, filtered))
    return letters, count_by_reason(["s"], filtered).get("s", {})


@pytest.mark.parametrize(
    ("keys", "kept", "dropped"),
    [
        ({}, "xyzw", {}),
        ({"languages": ["python", "RUST"]}, "xyz", {"languages": 1}),
        ({"languages": ["Rust"]}, "yz", {"languages": 2}),
        ({"min_chars": 20, "max_chars": 30}, "yz", {"min_chars": 1, "max_chars": 1}),
        ({"licenses": ["Mit"], "license_column": "files.license"}, "xw", {"licenses": 2}),
        ({"licenses": ["mit", "apache-2.0"], "license_column": "licenses"}, "xyzw", {}),
        ({"licenses": ["mit"], "license_column": "licenses"}, "", {"licenses": 4}),
        ({"languages": ["Rust"], "max_chars": 20}, "y", {"languages": 2, "max_chars": 1}),
    ],
)
def test_documents_are_kept_or_counted_under_the_first_reason(keys, kept, dropped):
    assert keep(**keys) == (kept, dropped)


def test_a_long_file_is_measured_whole_and_its_pieces_share_its_fate():
    row = {"repo_path": "r", "files": [{"file_path": "a", "content": "x" * 450_000}]}
    assert keep(row=row, max_chars=449_999) == ("", {"max_chars": 3})
    assert keep(row=row, max_chars=450_000, min_chars=450_000) == ("xxx", {})


def test_text_rows_are_filtered_by_their_columns():
    row = {"text": "bonjour", "language": "fr", "license": "CC-BY-4.0"}
    assert keep("text", row, languages=["fr"], licenses=["cc-by-4.0"]) == ("r", {})
    assert keep("text", row, languages=["en"]) == ("", {"languages": 1})


def write_rows(folder, number=40):
    folder.mkdir()
    rows = [
        {"text": f"{i} " + "word " * (i % 7), "language": "en" if i % 3 else "fr", "other": "MIT"}
        for i in range(number)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "0.parquet", row_group_size=8)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"licenses": ["MIT"]}, r"data\.sources\.s\.license_column needs the column license, but 0\.parquet has"),
        ({"languages": ["en"], "path": "b"}, r"data\.sources\.s\.languages needs the column language, but"),
    ],
)
def test_a_filter_without_its_column_is_the_users_mistake(tmp_path, keys, sentence):
    write_rows(tmp_path / "a")
    (tmp_path / "b").mkdir()
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "b" / "0.parquet")
    path = str(tmp_path / keys.pop("path", "a"))
    with pytest.raises(UserError, match=sentence):
        list_parts("s", Source(path=path, **keys))
    list_parts("s", Source(path=str(tmp_path / "a"), licenses=["MIT"], license_column="other", languages=["en"]))


def open_loader(folder, rank=0, degree=1, workers=0, start_step=0, lane_states=None):
    source = Source(path=str(folder), languages=["en"], min_chars=8, encode_batch_size=3)
    return LaneLoader(
        Data(lanes=4, window=4, sources={"s": source}, holdout_percent=10.0),
        Dataloader(num_workers=workers),
        load_tokenizer(),
        seed=0,
        seq_len=16,
        global_batch_size=4,
        steps=100,
        total_tokens=None,
        dp_rank=rank,
        dp_degree=degree,
        start_step=start_step,
        lane_states=lane_states,
    )


def test_counts_are_exact_across_resumes_workers_and_ranks(tmp_path):
    write_rows(tmp_path / "a")
    loader = open_loader(tmp_path / "a")
    counts, states = [], []
    for _ in range(14):
        batch = next(loader)
        counts.append(batch.filtered)
        states.append(batch.lane_states)
    assert json.loads(states[-1][0])["sources"]["s"][0][0] > 0, "the test must go beyond an epoch"
    assert (counts[-1][0, [0, 1, 4]] > 0).all() and counts[-1].shape == (1, len(REASONS))
    for step in range(1, 14):
        parts = [open_loader(tmp_path / "a", rank, 2, step % 3, step, states[step - 1]) for rank in range(2)]
        found = [next(part) for part in parts]
        np.testing.assert_array_equal(sum(batch.filtered for batch in found), counts[step])
        assert found[0].lane_states | found[1].lane_states == states[step]
        for part in parts:
            part.close()


def test_an_epochs_counts_are_the_sources(tmp_path):
    # One lane that has just begun the second epoch has dropped of the first all that there was to drop.
    write_rows(tmp_path / "a")
    table = pq.read_table(tmp_path / "a" / "0.parquet").to_pylist()
    french = sum(row["language"] == "fr" for row in table)
    short = sum(row["language"] == "en" and len(row["text"]) < 8 for row in table)
    source = Source(path=str(tmp_path / "a"), languages=["en"], min_chars=8)
    order = {"seed": 0, "seq_len": 1, "global_batch_size": 1, "steps": 100, "total_tokens": None}
    loader = LaneLoader(
        Data(lanes=1, window=4, sources={"s": source}), Dataloader(), load_tokenizer(), **order, dp_rank=0, dp_degree=1
    )
    before = None
    for batch in loader:
        if json.loads(batch.lane_states[0])["sources"]["s"][0][0] > 0:
            break
        before = batch.filtered
    assert (before[0] <= [french, short, 0, 0, 0]).all() and (batch.filtered[0] >= [french, short, 0, 0, 0]).all()
