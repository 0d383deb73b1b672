"""From a source's configuration to its parts, listed once and in a fixed order, and from the parts to the shards that
lanes read. Both depend on the source and the number of lanes only.

Everything that a user can get wrong about a source is found here, before any training: raises UserError.
"""

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from titan_loom.config.job_config import Data, Source, Streaming
from titan_loom.data import embedded
from titan_loom.data.documents import Format, get_format
from titan_loom.data.filters import filter_columns, has_filters
from titan_loom.data.packs import is_pack, open_pack
from titan_loom.data.readers import TEXT, Part, Shard, column_types, count_rows
from titan_loom.data.retry import Access
from titan_loom.data.text_files import language_of, list_files
from titan_loom.errors import UserError

FILES_PER_PART = 256
"""Text files are read in runs of this many: one part a file would shuffle well but open and close all day."""

MAX_HUB_NAME_CHARS = 96
"""As the Hub has it, owner included."""

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

    commit: str = ""
    """What the revision of a Hub dataset was resolved to."""

    rows: tuple[int, ...] = ()
    """Rows of each part, if `counted`."""

    def counted(self, access: Access | None = None) -> "Parts":
        """The same with its rows counted: at the cost of a footer for parquet, of reading everything for jsonl."""
        return replace(self, rows=tuple(count_rows(part, access) for part in self.parts))

    def shards(self, lanes: int) -> tuple[Shard, ...]:
        """What the lanes share out: whole parts, or, when there are fewer parts than lanes, runs of rows, so that every
        lane has some."""
        if len(self.parts) >= lanes:
            return tuple(Shard(part) for part in self.parts)
        rows = self.rows or self.counted().rows
        return _split(list(zip(self.parts, rows, strict=True)), lanes)

    def digest(self) -> str:
        """SHA-256 over names and sizes of everything that is read."""
        listing = [(part.name, part.size, part.entries) for part in self.parts]
        return hashlib.sha256(json.dumps(listing).encode()).hexdigest()


def list_sources(data: Data, commits: dict[str, str] | None = None) -> dict[str, Parts]:
    """The parts of every source by its name, counted where they will be split by rows: once for all lanes and ranks.

    Args:
        commits: of Hub datasets, by source, in place of what their revisions are now.

    Raises as `list_parts` does.
    """
    found = {}
    for name, source in data.sources.items():
        access = Access(name, data.streaming)
        parts = list_parts(name, source, access, (commits or {}).get(name))
        is_split = parts.kind != "pack" and len(parts.parts) < data.lanes
        found[name] = parts.counted(access) if is_split else parts
    return found


def list_parts(name: str, source: Source, access: Access | None = None, commit: str | None = None) -> Parts:
    """The parts of the source called `name`, its format and columns checked; of a Hub dataset, those at `commit`.

    Raises UserError for an unknown format, a path that does not exist, a folder without usable files or with parquet
    and jsonl, a damaged file (looked at are the footers of all parquet files, else the first row), rows that lack the
    format's columns or hold something else in them, a Hub dataset that is not there or cannot be reached; ReadError for
    one whose server keeps failing.
    """
    form = get_format(name, source.format)
    access = access or Access(name, Streaming())
    if source.pack is not None:
        return _pack_parts(f"data.sources.{name}.pack", source.pack)
    if is_pack(source.path):
        if has_filters(source):
            raise UserError(
                f"data.sources.{name}.path = {source.path!r} is a pack, whose documents cannot be filtered any more: "
                "set the filters where it is packed, not here"
            )
        return _pack_parts(f"data.sources.{name}.path", source.path)
    if is_on_hub(source.path):
        parts = _hub_parts(f"data.sources.{name}", source, commit, access)
    else:
        parts = find_parts(f"data.sources.{name}.path", source.path, source.format)
    # The footers of local tables are cheap to look at, those of a Hub dataset are not.
    looked_at = parts.parts if parts.kind == "parquet" and not parts.parts[0].is_remote else parts.parts[:1]
    for part in looked_at:
        found = column_types(part, access)
        if found:
            _check_columns(name, source, form, part, found)
    return parts


def is_on_hub(path: str) -> bool:
    """Whether `path` means a dataset on the Hub: it looks like one and is no local path."""
    looks_like = len(path) <= MAX_HUB_NAME_CHARS and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path) is not None
    return looks_like and not os.path.exists(path)


def source_settings(source: Source) -> dict[str, Any]:
    """What decides on the documents of `source`, besides its files."""
    settings = asdict(source) | {"revision": source.revision or "main"}
    for name in ("languages", "licenses"):
        settings[name] = sorted({value.lower() for value in settings[name]})
    return {name: value for name, value in settings.items() if name not in ("pack", "share", "encode_batch_size")}


def find_parts(key: str, path: str, form: str) -> Parts:
    """The parts at `path`, unread. `key` is where `path` was given, `form` what a folder of several kinds is read
    as."""
    found = f"{key} = {path!r}"
    if path.startswith("embedded:"):
        if path not in embedded.NAMES:
            raise UserError(f"{found} is not known: the embedded sources are {' and '.join(embedded.NAMES)}")
        part = Part(kind="embedded", name=path, path=path, size=embedded.size(path), entries=embedded.row_names(path))
        return Parts(kind="embedded", parts=(part,))
    if is_on_hub(path):
        raise UserError(f"{found} is no local file or folder; a dataset on the Hub can be a [data.sources.<name>] only")
    return _local_parts(found, path, form)


def _pack_parts(key: str, path: str) -> Parts:
    pack = open_pack(key, path)
    # By its contents: the same pack in another place is the same data.
    part = Part(kind="pack", name=pack.digest(), path=pack.path, size=pack.file_sizes()["tokens.bin"])
    return Parts(kind="pack", parts=(part,))


def _hub_parts(key: str, source: Source, commit: str | None, access: Access) -> Parts:
    from titan_loom.data.hub import Dataset  # which loads huggingface_hub

    dataset = Dataset(key, source.path, commit or source.revision or "main", access)
    files = dataset.list_files(source.config, source.split)
    by_kind = {kind: [file for file in files if _kind_of(file[0]) == kind] for kind in ("parquet", "jsonl")}
    kind = "parquet" if by_kind["parquet"] else "jsonl"
    if not by_kind[kind]:
        raise UserError(
            f"{key}.path = {source.path!r} has no parquet or jsonl file in configuration {source.config or 'default'}, "
            f"split {source.split}: give {key}.config and {key}.split as its card names them"
        )
    parts = tuple(
        Part(kind=kind, name=path, path=f"hf://datasets/{source.path}@{dataset.commit}/{path}", size=size)
        for path, size in by_kind[kind]
        if size
    )
    return Parts(kind=kind, parts=parts, num_ignored=len(files) - len(parts), commit=dataset.commit)


def _local_parts(found: str, given_path: str, form: str) -> Parts:
    # Not the methods of Path: they raise for a name that is too long and for a user that there is not.
    path = Path(os.path.expanduser(given_path))
    if not given_path or not os.path.exists(path):
        names = " or ".join(embedded.NAMES)
        raise UserError(
            f"{found} does not exist: give a file or folder of {_ALLOWED}, {names}, or a Hub dataset as owner/name"
        )
    if not (path.is_dir() or path.is_file()):
        raise UserError(f"{found} is neither a regular file nor a folder")
    root, files = (path, list_files(path)) if path.is_dir() else (path.parent, [path.name])
    by_kind: dict[str, list[str]] = {"parquet": [], "jsonl": [], "text": []}
    for file in files:
        if kind := _kind_of(file):
            by_kind[kind].append(file)
    kind = _choose_kind(found, form, by_kind)
    chosen = by_kind[kind]
    parts = _text_parts(root, chosen) if kind == "text" else _table_parts(kind, root, chosen)
    return Parts(kind=kind, parts=tuple(parts), num_ignored=len(files) - len(chosen))


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


def _table_parts(kind: str, root: Path, files: list[str]) -> list[Part]:
    return [Part(kind=kind, name=file, path=str(root / file), size=os.path.getsize(root / file)) for file in files]


def _text_parts(root: Path, files: list[str]) -> list[Part]:
    runs = [files[start : start + FILES_PER_PART] for start in range(0, len(files), FILES_PER_PART)]
    return [
        Part(
            kind="text",
            name=f"{run[0]} .. {run[-1]}",
            path=str(root.resolve()),
            size=sum(os.path.getsize(root / file) for file in run),
            entries=tuple(run),
        )
        for run in runs
    ]


def _check_columns(name: str, source: Source, form: Format, part: Part, found: dict[str, str]) -> None:
    if missing := set(form.columns) - found.keys():
        raise UserError(
            f"data.sources.{name}.format = {form.name!r} needs the columns {', '.join(form.columns)}, but {part.name} "
            f"lacks {', '.join(sorted(missing))} and has {', '.join(sorted(found))}"
        )
    for column in form.texts:
        if (kind := found.get(column, TEXT)) != TEXT:
            raise UserError(
                f"data.sources.{name}.format = {form.name!r} needs texts in the column {column}, but {part.name} has "
                f"{kind} there"
            )
    for column, key in filter_columns(source, form).items():
        if column not in found:
            raise UserError(
                f"data.sources.{name}.{key} needs the column {column}, but {part.name} has {', '.join(sorted(found))}"
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
