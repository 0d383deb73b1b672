"""Small sources for the data tests: parquet parts of numbered rows, and the corpus of `tests/assets`."""

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from titan_loom.config.job_config import Data, Dataloader, Source, Streaming
from titan_loom.data import readers
from titan_loom.data.loader import LaneLoader, batch_digests, combine_digests
from titan_loom.data.readers import Part, Row, Shard
from titan_loom.data.retry import Access
from titan_loom.data.rows import Order, RowStream
from titan_loom.data.source_reader import SourceReader
from titan_loom.data.sources import Parts, list_parts
from titan_loom.data.tokenizer import load_tokenizer

CORPUS = Path(__file__).parent.parent / "assets" / "corpus"
TOKENIZER = load_tokenizer()
SEQ_LEN, BATCH = 48, 8


def write_parquet(path: Path, texts: list[str], rows_per_group: int = 4) -> None:
    pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), path, row_group_size=rows_per_group)


def write_parts(folder: Path, rows_per_part: list[int]) -> list[str]:
    """One parquet file a part; all texts, each different."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [
        [f"document {part}.{row} " + "x " * (row % 7) for row in range(rows)] for part, rows in enumerate(rows_per_part)
    ]
    for part, part_texts in enumerate(texts):
        write_parquet(folder / f"part-{part:02}.parquet", part_texts)
    return [text for part_texts in texts for text in part_texts]


def shards_of(path: Path, lanes: int, form: str = "text") -> tuple[Shard, ...]:
    return list_parts("s", Source(path=str(path), format=form)).shards(lanes)


def memory_text(part: int, row: int) -> str:
    return f"{part}:{row}" + " word" * ((part + row) % 4 * 4)


def memory_rows(part: Part, start: int, stop: int | None, columns, access) -> Iterator[Row]:
    """Rows that cost nothing, so that many layouts can be tried."""
    return ({"text": memory_text(int(part.name), row)} for row in range(start, part.size if stop is None else stop))


readers._READERS["memory"] = readers._Reader(memory_rows, lambda part, access: part.size, lambda *_: {"text": "text"})


def memory_parts(rows_of_parts: list[int]) -> Parts:
    parts = [Part(kind="memory", name=str(i), path="", size=rows) for i, rows in enumerate(rows_of_parts)]
    return Parts(kind="memory", parts=tuple(parts), rows=tuple(rows_of_parts))


def row_stream(
    shards: tuple[Shard, ...],
    lane: int = 0,
    lanes: int = 1,
    state=None,
    *,
    form: str = "text",
    encode_batch_size: int = 4,
    name: str = "s",
    access: Access | None = None,
    **order: int,
) -> RowStream:
    source = Source(path="", format=form, encode_batch_size=encode_batch_size)
    reader = SourceReader(name, source, access or Access(name, Streaming()), shards=shards)
    return RowStream(reader, Order(**{"seed": 0, "lanes": lanes, "window": 4, "open_parts": 2, **order}), lane, state)


def rows_of_epoch(stream: RowStream, epoch: int) -> list[Row]:
    """The rows that `stream` gives in `epoch`."""
    rows = []
    for row, state in stream:
        if state[0] > epoch:
            return rows
        if state[0] == epoch:
            rows.append(row)


def write_corpus(folder: Path, num_parts: int = 3) -> None:
    """The corpus as parquet parts in `folder`/code and `folder`/prose."""
    for name, corpus in [("code", "repositories.jsonl"), ("prose", "prose.jsonl")]:
        rows = [json.loads(line) for line in (CORPUS / corpus).read_text("utf-8").splitlines()]
        (folder / name).mkdir()
        for part in range(num_parts):
            table = pa.Table.from_pylist(rows[part::num_parts])
            pq.write_table(table, folder / name / f"{part}.parquet", row_group_size=4)


def loader(data: Data, *, workers=0, rank=0, degree=1, prefetch_factor=2, **options) -> LaneLoader:
    """A rank's batches; `options` are those of LaneLoader."""
    options = {
        "seed": 0,
        "seq_len": SEQ_LEN,
        "global_batch_size": BATCH,
        "steps": 1000,
        "total_tokens": None,
        **options,
    }
    dataloader = Dataloader(num_workers=workers, prefetch_factor=prefetch_factor)
    return LaneLoader(data, dataloader, TOKENIZER, dp_rank=rank, dp_degree=degree, **options)


def read(data: Data, num_steps: int, *, degree=1, **options) -> tuple[list[str], dict[int, str]]:
    """Digest of each global batch and the states of all lanes after the last, as `degree` ranks give them."""
    digests, states = [[] for _ in range(num_steps)], {}
    for rank in range(degree):
        batches = loader(data, rank=rank, degree=degree, **options)
        for step in range(num_steps):
            batch = next(batches)
            digests[step] += batch_digests(batch)
        states |= batch.lane_states
        batches.close()
    return [combine_digests(rows) for rows in digests], states
