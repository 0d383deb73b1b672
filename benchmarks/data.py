"""Tokens per second of one lane, from local parquet and from a pack, on one core.

    python benchmarks/data.py [--repeats 5]

The parquet has the shape of stack-v3 (three row groups a part) and holds the standard library of this Python. All take
short turns on the same documents, so that each sees the same machine, and are compared within a round:

* bare: `encode_batch` of the tokenizers library on the documents, ready in memory, and nothing else;
* published: the usual way of a streaming trainer: a reservoir of rows for shuffling, one `encode` a document, a list of
  tokens that grows at its end and is cut at its front. It reads the same columns with the same reader, and holds as
  many rows as our lane;
* lane: `titan_loom`'s, exactly resumable at every sequence: windows, documents, tokens, sequences;
* pack: the same lane from a pack of the same documents.

Run it on an idle machine: the load is printed.
"""

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tokenizers

from titan_loom.config import Data, JobConfig, Source
from titan_loom.data.documents import FORMATS
from titan_loom.data.lanes import open_stream
from titan_loom.data.loader import build_plan
from titan_loom.data.packing import pack
from titan_loom.data.readers import Shard, open_rows
from titan_loom.data.sources import list_parts
from titan_loom.data.tokenizer import DEFAULT_PATH, EOS_ID, load_tokenizer

SEQ_LEN, WINDOW, NUM_PARTS = 4096, 64, 4
TURN_TOKENS = 50_000
FORM = FORMATS["repository"]
TARGETS = {"lane / bare": 0.85, "lane / published": 1.3}
PACK_TARGET = 20e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as folder:
        source = write_parquet(Path(folder) / "parquet")
        config = JobConfig(data=Data(sources={"code": source}))
        packed = pack(config, "code", Path(folder) / "pack", workers=1)
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        measure(source, Source(path=packed.path), packed.num_tokens, repeats)


def write_parquet(folder: Path) -> Source:
    """Repositories dealt to parts as they come, sorted within each."""
    folder.mkdir()
    (embedded,) = list_parts("code", Source(path="embedded:code", format="repository")).parts
    rows = list(open_rows(Shard(embedded), 0, ()))
    for part in range(NUM_PARTS):
        mine = rows[part::NUM_PARTS]
        table = pa.Table.from_pylist(mine)
        pq.write_table(table, folder / f"{part:05}.parquet", row_group_size=-(-len(mine) // 3), compression="zstd")
    return Source(path=str(folder), format="repository")


def measure(parquet: Source, packed: Source, num_tokens: int, repeats: int) -> None:
    bare_tokenizer = tokenizers.Tokenizer.from_file(str(DEFAULT_PATH / "tokenizer.json"))
    bare_tokenizer.encode_special_tokens = True
    parts = list_parts("code", parquet).parts
    texts = [document.text for part in parts for row in read(part) for document in FORM.read(row, "code")]
    num_sequences = num_tokens // SEQ_LEN - 1  # within the first epoch
    runs: dict[str, Callable[[], Iterator[int]]] = {
        "bare": lambda: bare(bare_tokenizer, texts),
        "published": lambda: lengths(published(bare_tokenizer, parts), num_sequences),
        "lane": lambda: lengths(lane(parquet), num_sequences),
        "pack": lambda: lengths(lane(packed), num_sequences),
    }
    print(f"{len(texts):,} documents, {num_tokens:,} tokens, one core, load {os.getloadavg()[0]:.1f} before")
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, rate in one_round({name: run() for name, run in runs.items()}).items():
            rates[name].append(rate)
    print(f"load {os.getloadavg()[0]:.1f} after; medians of {repeats} rounds, ratios within a round\n")
    for name, found in rates.items():
        print(f"{name:24}{statistics.median(found):>14,.0f} tokens/s    ({min(found):,.0f} to {max(found):,.0f})")
    print()
    for name, target in TARGETS.items():
        first, second = name.split(" / ")
        ratio = statistics.median(a / b for a, b in zip(rates[first], rates[second], strict=True))
        print(f"{name:24}{ratio:>14.3f}    target {target}: {verdict(ratio >= target)}")
    found = statistics.median(rates["pack"])
    print(
        f"{'pack':24}{found / 1e6:>14.1f} M tokens/s    target {PACK_TARGET / 1e6:g} M: {verdict(found >= PACK_TARGET)}"
    )


def one_round(runs: dict[str, Iterator[int]]) -> dict[str, float]:
    """Tokens per second of each run, which take short turns until each is through."""
    tokens, seconds = dict.fromkeys(runs, 0), dict.fromkeys(runs, 0.0)
    running = dict(runs)
    while running:
        for name, run in list(running.items()):
            start, until = time.perf_counter(), tokens[name] + TURN_TOKENS
            while tokens[name] < until and name in running:
                if (found := next(run, None)) is None:
                    del running[name]
                else:
                    tokens[name] += found
            seconds[name] += time.perf_counter() - start
    return {name: tokens[name] / seconds[name] for name in runs}


def verdict(holds: bool) -> str:
    return "met" if holds else "MISSED"


def read(part) -> Iterator[dict]:
    return open_rows(Shard(part), 0, FORM.columns + FORM.optional)


def lengths(sequences: Iterator[np.ndarray], number: int) -> Iterator[int]:
    return (len(tokens) - 1 for tokens in islice(sequences, number))


def bare(tokenizer: tokenizers.Tokenizer, texts: list[str]) -> Iterator[int]:
    for start in range(0, len(texts), 16):
        yield sum(map(len, tokenizer.encode_batch(texts[start : start + 16], add_special_tokens=False)))


def published(tokenizer: tokenizers.Tokenizer, parts: tuple) -> Iterator[np.ndarray]:
    generator = random.Random(0)
    buffer: list[int] = []
    for row in reservoir((row for part in parts for row in read(part)), 2 * WINDOW, generator):
        for document in FORM.documents(row):
            buffer += tokenizer.encode(document.text, add_special_tokens=False).ids
            buffer.append(EOS_ID)
            while len(buffer) > SEQ_LEN:
                yield np.array(buffer[: SEQ_LEN + 1], dtype=np.int32)
                del buffer[:SEQ_LEN]


def reservoir(rows: Iterator[dict], size: int, generator: random.Random) -> Iterator[dict]:
    held = list(islice(rows, size))
    for row in rows:
        i = generator.randrange(size)
        yield held[i]
        held[i] = row
    generator.shuffle(held)
    yield from held


def lane(source: Source) -> Iterator[np.ndarray]:
    data = Data(lanes=1, window=WINDOW, sources={"code": source})
    order = {"seed": 0, "seq_len": SEQ_LEN, "global_batch_size": 1, "steps": 1, "total_tokens": None}
    plan = build_plan(data, load_tokenizer(), **order)
    stream = open_stream(plan, plan.sources[0], 0)
    while True:
        yield stream.read_row(SEQ_LEN)[0]
        stream.state()


if __name__ == "__main__":
    main()
