"""Small corpora in the shapes of stack-v3 (a row is a repository) and FineWeb-Edu (a row is a text).

Every document is unlike every other, also across seeds, so that a multiset of documents shows what was lost or seen
twice. Beside the columns that training reads stand bulky ones that compress badly: bytes on the wire show whether they
were read.
"""

import io
import random
from collections.abc import Callable

import pyarrow as pa
import pyarrow.parquet as pq

_STACK_SCHEMA = pa.schema(
    {
        "repo_path": pa.string(),
        "files": pa.list_(
            pa.struct(
                {
                    "file_path": pa.string(),
                    "content": pa.string(),
                    "language": pa.string(),
                    "is_vendor": pa.bool_(),
                    "size": pa.int64(),
                }
            )
        ),
        "num_files": pa.int64(),
        "commit_log": pa.string(),
        "licenses": pa.list_(pa.string()),
    }
)

_FINEWEB_SCHEMA = pa.schema(
    {"text": pa.string(), "id": pa.string(), "url": pa.string(), "score": pa.float64(), "dump": pa.string()}
)

_LANGUAGES = {"py": "Python", "md": "Markdown", "rs": "Rust"}
_SYLLABLES = ["ka", "lo", "mi", "ne", "pu", "ra", "so", "ti", "vu", "we", "xa", "yo"]
_WORDS = [first + second for first in _SYLLABLES for second in _SYLLABLES]
_NOISE_BYTES = 500


def stack_parts(num_parts: int, rows_per_part: int, seed: int, row_group_size: int) -> dict[str, bytes]:
    """`data/train-00000-of-00004.parquet` ...: repositories of one to four files, some vendored or blank."""
    names = [f"data/train-{part:05d}-of-{num_parts:05d}.parquet" for part in range(num_parts)]
    return _parts(names, rows_per_part, seed, row_group_size, _STACK_SCHEMA, _stack_row)


def fineweb_parts(
    num_parts: int, rows_per_part: int, seed: int, row_group_size: int, folder: str = "sample/10BT"
) -> dict[str, bytes]:
    """`sample/10BT/000_00000.parquet` ...: one text a row."""
    names = [f"{folder}/{part:03d}_00000.parquet" for part in range(num_parts)]
    return _parts(names, rows_per_part, seed, row_group_size, _FINEWEB_SCHEMA, _fineweb_row)


def readme(configs: dict[str, str]) -> bytes:
    """A dataset card whose configurations are globs of data files: `{"sample-10BT": "sample/10BT/*"}`."""
    lines = ["---", "configs:"]
    for name, glob in configs.items():
        lines += [f"- config_name: {name}", "  data_files:", "  - split: train", f"    path: {glob}"]
    return "\n".join([*lines, "---", "", "# A generated corpus", ""]).encode()


def _parts(
    names: list[str],
    rows_per_part: int,
    seed: int,
    row_group_size: int,
    schema: pa.Schema,
    make_row: Callable[[random.Random, str], dict],
) -> dict[str, bytes]:
    parts = {}
    for part, name in enumerate(names):
        draw = random.Random(f"{seed}:{name}")
        sink = io.BytesIO()
        with pq.ParquetWriter(sink, schema, compression="zstd") as writer:
            for start in range(0, rows_per_part, row_group_size):
                group = range(start, min(start + row_group_size, rows_per_part))
                rows = [make_row(draw, f"{seed}-{part}-{row}") for row in group]
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
        parts[name] = sink.getvalue()
    return parts


def _stack_row(draw: random.Random, key: str) -> dict:
    files = []
    for index in range(draw.randint(1, 4)):
        suffix, language = draw.choice(list(_LANGUAGES.items()))
        blank = index > 0 and draw.random() < 0.1
        content = "\n \n" if blank else _text(draw, f"file {key}-{index}")
        file = {"file_path": f"src/module_{index}.{suffix}", "content": content, "language": language}
        files.append(file | {"is_vendor": index > 0 and draw.random() < 0.1, "size": len(content)})
    return {
        "repo_path": f"owner/repository-{key}",
        "files": files,
        "num_files": len(files),
        "commit_log": _noise(draw),
        "licenses": ["MIT"],
    }


def _fineweb_row(draw: random.Random, key: str) -> dict:
    return {
        "text": _text(draw, f"page {key}"),
        "id": f"<urn:uuid:{key}>",
        "url": f"https://example.org/{key}",
        "score": draw.uniform(2.5, 5.0),
        "dump": _noise(draw),
    }


def _text(draw: random.Random, first_line: str) -> str:
    words = draw.choices(_WORDS, k=draw.randint(5, 120))
    lines = [" ".join(words[start : start + 12]) for start in range(0, len(words), 12)]
    return "\n".join([first_line, *lines]) + "\n"


def _noise(draw: random.Random) -> str:
    return draw.randbytes(_NOISE_BYTES).hex()
