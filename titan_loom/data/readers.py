"""Rows of a part, from any row on, without state.

A part is what is opened at once: a parquet or jsonl file, here or on the Hub, a run of text files, an embedded corpus.
Parquet is read by `ParquetFile.iter_batches` in small batches through a 1 MiB buffer, which keeps one open part under
about 100 MiB whatever the size of its row groups (`datasets` streaming takes 1.1 GB for a row group of 300 MB). jsonl
is read line by line: readers that guess the types of columns turn texts that look like dates into dates, and do not say
which row is wrong.
"""

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.lib import ArrowException

from titan_loom.config.job_config import Streaming
from titan_loom.data import embedded
from titan_loom.data.retry import Access, Transient, first_line
from titan_loom.data.text_files import language_of, read_text
from titan_loom.errors import ReadError, UserError

Row = dict[str, Any]

ROWS_PER_BATCH = 16
_CODECS = {".gz": "gzip", ".zst": "zstd"}
_LIST_LEVELS = {"list", "element", "item", "array", "bag"}  # what writers call the levels of a list

BUFFER_BYTES = 1 << 20
FOOTERS_IN_MEMORY = 64
TEXT = "text"
"""The type, for `column_types`, of texts and of nulls."""


class BadRow(Exception):
    """A row that is not what it must be; the text says what it is."""


DAMAGED = (BadRow, ArrowException, OSError, EOFError, UnicodeDecodeError)
"""What reading a damaged file raises."""


@dataclass(frozen=True, kw_only=True)
class Part:
    kind: str
    """`parquet`, `jsonl`, `text` or `embedded`."""

    name: str
    """Name within the source, for messages and fingerprints."""

    path: str
    """The file, `hf://datasets/owner/name@commit/file` if it is on the Hub; for `text` the folder of the files."""

    size: int
    """Bytes."""

    entries: tuple[str, ...] = ()
    """`text` and `embedded`: the names of the rows."""

    @property
    def is_remote(self) -> bool:
        return self.path.startswith("hf://")


@dataclass(frozen=True)
class Shard:
    """Rows `start` to `stop` (None: to the end) of a part."""

    part: Part
    start: int = 0
    stop: int | None = None


def open_rows(
    shard: Shard,
    start_row: int,
    columns: tuple[str, ...],
    access: Access | None = None,
    texts: tuple[str, ...] = (),
) -> Iterator[Row]:
    """The rows of `shard` from its row `start_row` on.

    `columns` are the columns to read, `files.content` being a field of the structs in `files`. Columns that the part
    lacks are left out; parts whose rows are whole files or embedded give all that they have. `access` is the source's,
    by default one of this part's own. `texts` are columns that must hold texts or nulls.

    Raises when the part can be read no further, with the row: UserError for a file of the user's that is damaged or
    holds something else, ReadError for any other.
    """
    part, row = shard.part, shard.start + start_row
    access = access or _default_access(part)
    try:
        nested = {column.partition(".")[0] for column in columns if "." in column}
        for item in _READERS[part.kind].rows(part, row, shard.stop, columns, access):
            for name in nested & item.keys():
                item[name] = _list_of_structs(item[name])
            _check_texts(item, texts)
            yield item
            row += 1
    except ReadError as error:
        raise ReadError(error.source, error.part, error.reason, row) from error
    except DAMAGED as error:
        raise _unreadable(part, access, error, row) from error


def count_rows(part: Part, access: Access | None = None) -> int:
    """Rows of a part: from the footer for parquet, by reading it once for jsonl. Raises as `open_rows` does."""
    access = access or _default_access(part)
    try:
        return _READERS[part.kind].count(part, access)
    except DAMAGED as error:
        raise _unreadable(part, access, error) from error


def column_types(part: Part, access: Access | None = None) -> dict[str, str]:
    """Columns of a part and what they hold (`TEXT`, or the name of another type), with fields of structs as
    `files.content`; empty when the part has no rows to tell from. Of jsonl the first row is looked at. Raises as
    `open_rows` does."""
    access = access or _default_access(part)
    try:
        return _READERS[part.kind].columns(part, access)
    except DAMAGED as error:
        raise _unreadable(part, access, error) from error


def _unreadable(part: Part, access: Access, error: Exception, row: int | None = None) -> UserError | ReadError:
    failure = ReadError(access.name, part.name, first_line(error), row)
    is_of_the_machine = isinstance(error, OSError) and error.errno is not None
    return failure if part.is_remote or is_of_the_machine else UserError(str(failure))


def _list_of_structs(value: Any) -> Any:
    """A struct of lists, as some writers lay it out, as the list of structs that it stands for."""
    if not isinstance(value, dict) or not all(isinstance(items, list) for items in value.values()):
        return value
    if len({len(items) for items in value.values()}) > 1:
        raise BadRow("its lists differ in length")
    return [dict(zip(value, items, strict=True)) for items in zip(*value.values(), strict=True)]


def _check_texts(row: Row, columns: tuple[str, ...]) -> None:
    for column in columns:
        name, _, field = column.partition(".")
        value = row.get(name)
        if not field:
            _check_text(column, value)
        elif isinstance(value, list) and all(isinstance(struct, dict) for struct in value):
            for struct in value:
                _check_text(column, struct.get(field))
        elif value is not None:
            raise BadRow(f"its {name} must be a list of objects")


def _check_text(column: str, value: Any) -> None:
    if value is not None and not isinstance(value, str):
        raise BadRow(f"its {column} must be a text, but is of type {type(value).__name__}")


def _default_access(part: Part) -> Access:
    return Access(part.name, Streaming())


def open_file(part: Part, access: Access) -> BinaryIO:
    """The bytes of a part."""
    if part.is_remote:
        from titan_loom.data.hub import HubFile  # which loads huggingface_hub

        return HubFile(part.name, part.path, part.size, access)
    return open(part.path, "rb", buffering=0)


def _parquet_rows(part: Part, start: int, stop: int | None, columns: tuple[str, ...], access: Access) -> Iterator[Row]:
    row, tries = start, 0
    while True:
        try:
            for item in _read_parquet(part, row, stop, columns, access):
                yield item
                row, tries = row + 1, 0
            return
        except DAMAGED as error:
            tries += 1
            _read_again(part, access, error, tries)


def _read_again(part: Part, access: Access, error: Exception, tries: int) -> None:
    """Let a remote part that gave nonsense be read again: with the right status and length, only decoding shows it."""
    if not part.is_remote:
        raise error
    access.failed(part.name, Transient(f"damaged data ({first_line(error)})", wrong=True), tries)


def _read_parquet(part: Part, start: int, stop: int | None, columns: tuple[str, ...], access: Access) -> Iterator[Row]:
    footer = _footer(part, access)
    leaves = [path for path, name in _leaves(footer) if name in columns or name.split(".")[0] in columns]
    groups, first_row = _row_groups(footer, start, stop)
    to_skip, to_read = start - first_row, None if stop is None else stop - start
    with open_file(part, access) as file:
        parquet = pq.ParquetFile(file, metadata=footer, pre_buffer=False, buffer_size=BUFFER_BYTES)
        # Threads and pre-buffering make an interpreter that exits in the middle of a file hang or abort.
        batches = parquet.iter_batches(ROWS_PER_BATCH, row_groups=groups, columns=leaves, use_threads=False)
        yield from islice(_rows_of_batches(batches, to_skip), to_read)


_footers: dict[str, pq.FileMetaData] = {}


def _footer(part: Part, access: Access) -> pq.FileMetaData:
    """The footer of a part; that of a remote one is fetched once in each process."""
    tries = 0
    while (footer := _footers.get(part.path)) is None:
        try:
            with open_file(part, access) as file:
                footer = pq.read_metadata(file)
        except DAMAGED as error:
            tries += 1
            _read_again(part, access, error, tries)
            continue
        if not part.is_remote:
            return footer
        _footers[part.path] = footer
        if len(_footers) > FOOTERS_IN_MEMORY:
            del _footers[next(iter(_footers))]
    return footer


def _rows_of_batches(batches: Iterator, to_skip: int) -> Iterator[Row]:
    for batch in batches:
        if to_skip < batch.num_rows:
            yield from batch.slice(to_skip).to_pylist()
        to_skip = max(0, to_skip - batch.num_rows)


def _row_groups(footer: pq.FileMetaData, start: int, stop: int | None) -> tuple[list[int], int]:
    """The row groups that hold rows `start` to `stop`, and the first row of the first of them."""
    groups, first_row, row = [], start, 0
    for group in range(footer.num_row_groups):
        next_row = row + footer.row_group(group).num_rows
        if start < next_row and (stop is None or row < stop):
            first_row = first_row if groups else row
            groups.append(group)
        row = next_row
    return groups, first_row


def _leaves(footer: pq.FileMetaData) -> list[tuple[str, str]]:
    """Path in the file and our name of every leaf: `files.list.element.content` (a list of structs) and
    `files.content.list.element` (a struct of lists) are both `files.content`."""
    paths = [footer.schema.column(i).path for i in range(footer.num_columns)]
    return [(path, ".".join([name for name in path.split(".") if name not in _LIST_LEVELS][:2])) for path in paths]


def _count_parquet(part: Part, access: Access) -> int:
    return _footer(part, access).num_rows


def _parquet_columns(part: Part, access: Access) -> dict[str, str]:
    types = {}
    for column in _footer(part, access).schema.to_arrow_schema():
        types[column.name] = _type_name(column.type)
        struct = _item_type(column.type)
        if pa.types.is_struct(struct):
            types |= {f"{column.name}.{field.name}": _type_name(_item_type(field.type)) for field in struct}
    return types


def _item_type(found: pa.DataType) -> pa.DataType:
    return found.value_type if pa.types.is_list(found) or pa.types.is_large_list(found) else found


def _type_name(found: pa.DataType) -> str:
    found = found.value_type if pa.types.is_dictionary(found) else found
    are_texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
    return TEXT if any(is_text(found) for is_text in are_texts) else str(found)


def _jsonl_rows(part: Part, start: int, stop: int | None, columns: tuple[str, ...], access: Access) -> Iterator[Row]:
    wanted = {column.split(".")[0] for column in columns}
    for line in islice(_jsonl_lines(part, access), start, stop):
        row = _parse(line)
        yield {name: row.get(name) for name in wanted}


def _count_jsonl(part: Part, access: Access) -> int:
    return sum(1 for _ in _jsonl_lines(part, access))


def _jsonl_columns(part: Part, access: Access) -> dict[str, str]:
    types = {}
    for line in islice(_jsonl_lines(part, access), 1):
        for name, value in _parse(line).items():
            types[name] = _type_of(value)
            structs = _list_of_structs(value)
            first = structs[0] if isinstance(structs, list) and structs else structs
            if isinstance(first, dict):
                types |= {f"{name}.{field}": _type_of(inner) for field, inner in first.items()}
    return types


def _type_of(value: Any) -> str:
    return TEXT if value is None or isinstance(value, str) else type(value).__name__


def _parse(line: bytes) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"the line is no JSON ({first_line(error)})") from error
    if not isinstance(row, dict):
        raise BadRow(f"the line must be a JSON object, but is of type {type(row).__name__}")
    return row


def _jsonl_lines(part: Part, access: Access) -> Iterator[bytes]:
    with io.BufferedReader(open_file(part, access), BUFFER_BYTES) as file:
        codec = _CODECS.get(Path(part.name).suffix.lower())
        lines = io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(file, mode="r"), codec)) if codec else file
        yield from (line for line in lines if line.strip())


def _entry_rows(part: Part, start: int, stop: int | None, columns: tuple[str, ...], access: Access) -> Iterator[Row]:
    read = _text_row if part.kind == "text" else embedded.row
    return (read(part.path, entry) for entry in part.entries[start:stop])


def _text_row(folder: str, entry: str) -> Row:
    root = Path(folder)
    content = read_text(root / entry)
    return {
        "repo_path": root.name,
        "file_path": entry,
        "language": language_of(entry),
        "content": content,
        "text": content,
    }


def _entry_columns(part: Part, access: Access) -> dict[str, str]:
    if part.kind == "text":
        return dict.fromkeys(("repo_path", "file_path", "language", "content", "text"), TEXT)
    if part.name == "embedded:prose":
        return {"text": TEXT}
    texts = ("repo_path", "files.file_path", "files.content", "files.language")
    return {**dict.fromkeys(texts, TEXT), "files": "list", "files.is_vendor": "bool"}


@dataclass(frozen=True)
class _Reader:
    rows: Callable[[Part, int, int | None, tuple[str, ...], Access], Iterator[Row]]
    count: Callable[[Part, Access], int]
    columns: Callable[[Part, Access], dict[str, str]]


_ENTRIES = _Reader(_entry_rows, lambda part, access: len(part.entries), _entry_columns)
_READERS = {
    "parquet": _Reader(_parquet_rows, _count_parquet, _parquet_columns),
    "jsonl": _Reader(_jsonl_rows, _count_jsonl, _jsonl_columns),
    "text": _ENTRIES,
    "embedded": _ENTRIES,
}
