"""From a source's configuration to its parts, listed once and in a fixed order, and from the parts to the shards that
lanes read. Both depend on the source and the number of lanes only.

Everything that a user can get wrong about a source is found here, before any training: raises UserError.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from pyarrow.lib import ArrowException

from titan_loom.config.job_config import Source
from titan_loom.data import embedded
from titan_loom.data.documents import Format, get_format
from titan_loom.data.languages import language_of
from titan_loom.data.readers import Part, Shard, column_names, count_rows
from titan_loom.data.text_files import list_files
from titan_loom.errors import UserError

FILES_PER_PART = 256
"""Text files are read in runs of this many: one part a file would shuffle well but open and close all day."""

_ALLOWED = "parquet (.parquet), jsonl (.jsonl, .jsonl.gz, .jsonl.zst) or text files (.py, .md, .txt and the like)"
_TABLES = {".parquet": "parquet", ".jsonl": "jsonl", ".jsonl.gz": "jsonl", ".jsonl.zst": "jsonl"}
_NOTICES = ("readme", "license", "licence", "notice")


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of one source, sorted."""

    kind: str
    parts: tuple[Part, ...]
    num_ignored: int = 0
    """Files of the folder that are not read."""

    def shards(self, lanes: int) -> tuple[Shard, ...]:
        """What the lanes share out: whole parts, or, when there are fewer parts than lanes, runs of rows, so that every
        lane has some."""
        if len(self.parts) >= lanes:
            return tuple(Shard(part) for part in self.parts)
        return _split([(part, count_rows(part)) for part in self.parts], lanes)

    def digest(self) -> str:
        """SHA-256 over names and sizes of everything that is read."""
        listing = [(part.name, part.size, part.entries) for part in self.parts]
        return hashlib.sha256(json.dumps(listing).encode()).hexdigest()


def list_parts(name: str, source: Source) -> Parts:
    """The parts of the source called `name`, its format and columns checked.

    Raises UserError for an unknown format, a path that does not exist, a folder without usable files or with parquet
    and jsonl, a damaged first part, and rows that lack the format's columns.
    """
    form = get_format(name, source.format)
    key = f"data.sources.{name}.path"
    parts = find_parts(key, source.path, source.format)
    _check_columns(name, form, parts.parts[0])
    return parts


def find_parts(key: str, path: str, form: str) -> Parts:
    """The parts at `path`, unread. `key` is where `path` was given, `form` what a folder of several kinds is read
    as."""
    found = f"{key} = {path!r}"
    if path.startswith("embedded:"):
        return _embedded_parts(found, path)
    return _local_parts(found, path, form)


def _embedded_parts(found: str, path: str) -> Parts:
    if path not in embedded.NAMES:
        raise UserError(f"{found} is not known: the embedded sources are {' and '.join(embedded.NAMES)}")
    part = Part(kind="embedded", name=path, path=path, size=embedded.size(path), entries=embedded.row_names(path))
    return Parts(kind="embedded", parts=(part,))


def _local_parts(found: str, given_path: str, form: str) -> Parts:
    path = Path(given_path).expanduser()
    if not given_path or not path.exists():
        raise UserError(f"{found} {_why_missing(given_path)}")
    root, files = (path, list_files(path)) if path.is_dir() else (path.parent, [path.name])
    by_kind: dict[str, list[str]] = {"parquet": [], "jsonl": [], "text": []}
    for file in files:
        if kind := _kind_of(file):
            by_kind[kind].append(file)
    kind = _choose_kind(found, form, by_kind)
    chosen = by_kind[kind]
    if any(file.endswith(".zst") for file in chosen) and not find_spec("zstandard"):
        raise UserError(f"{found} holds .zst files, which need `pip install zstandard`")
    parts = _text_parts(root, chosen) if kind == "text" else [_file_part(kind, root, file) for file in chosen]
    return Parts(kind=kind, parts=tuple(parts), num_ignored=len(files) - len(chosen))


def _why_missing(path: str) -> str:
    embedded_names = " or ".join(embedded.NAMES)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not path.startswith("."):
        return (
            "is no local file or folder, and streaming a dataset from the Hub is not available: "
            f"give a local path, {embedded_names}"
        )
    return f"does not exist: give a file or folder of {_ALLOWED}, or {embedded_names}"


def _kind_of(file: str) -> str | None:
    name = file.lower()
    for suffix, kind in _TABLES.items():
        if name.endswith(suffix):
            return kind
    return "text" if language_of(file) else None


def _choose_kind(found: str, form: str, by_kind: dict[str, list[str]]) -> str:
    """What a folder is read as. Rows of format `file` are what text files give, so there text comes first: a folder
    of code may hold a table somewhere. Other formats read tables, beside which there may be a README."""
    tables = [kind for kind in ("parquet", "jsonl") if by_kind[kind]]
    is_notice = [PurePosixPath(file).stem.lower() in _NOTICES for file in by_kind["text"]]
    if by_kind["text"] and (not tables or (form == "file" and not all(is_notice))):
        return "text"
    if len(tables) > 1:
        raise UserError(f"{found} mixes parquet and jsonl files: give a folder (or one file) of one kind")
    if not tables:
        raise UserError(f"{found} holds no usable file: allowed are {_ALLOWED}")
    return tables[0]


def _file_part(kind: str, root: Path, file: str) -> Part:
    path = root / file
    return Part(kind=kind, name=file, path=str(path), size=path.stat().st_size)


def _text_parts(root: Path, files: list[str]) -> list[Part]:
    runs = [files[start : start + FILES_PER_PART] for start in range(0, len(files), FILES_PER_PART)]
    return [
        Part(
            kind="text",
            name=f"{run[0]} .. {run[-1]}",
            path=str(root.resolve()),
            size=sum((root / file).stat().st_size for file in run),
            entries=tuple(run),
        )
        for run in runs
    ]


def _check_columns(name: str, form: Format, part: Part) -> None:
    try:
        found = column_names(part)
    except (ArrowException, OSError, EOFError, ValueError, AttributeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"data.sources.{name}.path: {part.name} cannot be read as {part.kind} ({reason})") from error
    if found and (missing := set(form.columns) - found):
        raise UserError(
            f"data.sources.{name}.format = {form.name!r} needs the columns {', '.join(form.columns)}, but {part.name} "
            f"lacks {', '.join(sorted(missing))} and has {', '.join(sorted(found))}"
        )


def _split(counted: list[tuple[Part, int]], lanes: int) -> tuple[Shard, ...]:
    """One shard a lane, as even as whole rows allow; with fewer rows than lanes, one a row."""
    counted = [(part, rows) for part, rows in counted if rows]
    num_shards = min(lanes, sum(rows for _, rows in counted))
    pieces = [1] * len(counted)
    while sum(pieces) < num_shards:
        longest = max(range(len(counted)), key=lambda i: counted[i][1] / pieces[i])
        pieces[longest] += 1
    return tuple(
        Shard(part, rows * piece // num_pieces, rows * (piece + 1) // num_pieces)
        for (part, rows), num_pieces in zip(counted, pieces, strict=True)
        for piece in range(num_pieces)
    )
