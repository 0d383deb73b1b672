"""Packed corpora: documents tokenised once, memory-mapped, read in the order of a permutation of all of them.

A pack is a folder: `metadata.json`, written last; `tokens.bin`, all documents back to back, each ended by EOS;
`starts.bin`, where each begins, and the end; `points.bin`, where the holdout's hash puts each. All documents are in it:
what is held out is decided when it is read, by the same rule as for a stream.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from titan_loom.data.tokenizer import Tokenizer
from titan_loom.errors import UserError

METADATA = "metadata.json"
FORMAT = "titan_loom pack 1"


@dataclass(frozen=True, kw_only=True, eq=False)
class Pack:
    """What `metadata.json` says of the pack in folder `path`. Cheap to pass to workers: each maps the files itself."""

    path: str
    dtype: str
    """Of the tokens, little-endian: `<u2` while the vocabulary fits, else `<u4`."""

    num_documents: int
    num_tokens: int
    tokenizer: str
    """SHA-256 of the `tokenizer.json`."""

    vocab_size: int
    sha256: dict[str, str]
    """By file."""

    origin: list[dict]
    """What was packed, for a reader of the file: an entry for each source, several after a merge."""

    def array(self, name: str) -> np.ndarray:
        """`tokens`, `starts` (documents + 1, int64) or `points` (uint64), from the memory map."""
        path, dtype = f"{self.path}/{name}.bin", {"tokens": self.dtype, "starts": "<i8", "points": "<u8"}[name]
        if not os.path.getsize(path):
            return np.empty(0, dtype)
        # Slices of a memmap are memmaps, which cost several times as much to make as those of a plain array.
        return np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)

    def file_sizes(self) -> dict[str, int]:
        """Bytes that each file must have."""
        return {
            "tokens.bin": self.num_tokens * np.dtype(self.dtype).itemsize,
            "starts.bin": 8 * (self.num_documents + 1),
            "points.bin": 8 * self.num_documents,
        }

    def digest(self) -> str:
        """SHA-256 over the files' checksums: of the contents."""
        return hashlib.sha256(json.dumps(self.sha256, sort_keys=True).encode()).hexdigest()

    def write_metadata(self) -> None:
        """Makes the folder a pack."""
        aside = Path(self.path) / f"{METADATA}.writing"
        fields = {name: value for name, value in asdict(self).items() if name != "path"}
        aside.write_text(json.dumps({"format": FORMAT, **fields}, indent=2) + "\n", "utf-8")
        aside.rename(Path(self.path) / METADATA)


def is_pack(path: str) -> bool:
    """Whether `path` is a folder with a pack's metadata."""
    file = Path(os.path.expanduser(path)) / METADATA
    return os.path.isfile(file) and FORMAT.rpartition(" ")[0] in file.read_bytes()[:100].decode(errors="replace")


def open_pack(key: str, path: str) -> Pack:
    """The pack in folder `path`, which was given as `key`. The sizes of its files are checked, their contents are not
    (that takes as long as reading them: see `verify`).

    Raises UserError for a folder that is no pack, another version of the format and files of another size.
    """
    folder, found = Path(path).expanduser().resolve(), f"{key} = {path!r}"
    if not is_pack(path):
        raise UserError(f"{found} is no pack: it must be a folder that `titan-loom pack` has finished")
    try:
        fields = json.loads((folder / METADATA).read_text("utf-8"))
        if (version := fields.pop("format")) != FORMAT:
            raise UserError(f"{found} is in format {version!r}, but this version reads {FORMAT!r} only: pack it again")
        pack = Pack(path=str(folder), **fields)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise UserError(f"{found}: {METADATA} is damaged ({error}): pack it again") from error
    for name, size in pack.file_sizes().items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size:
            there = f"has {file.stat().st_size:,} bytes" if file.is_file() else "is missing"
            raise UserError(f"{found}: {name} {there} but must have {size:,}: copy or pack it again")
    return pack


def check_pack(key: str, pack: Pack, tokenizer: Tokenizer) -> None:
    """Raises UserError unless `pack` was made with `tokenizer`."""
    if pack.tokenizer != tokenizer.sha256:
        raise UserError(
            f"{key} = {pack.path!r} was packed with another tokenizer ({pack.tokenizer[:12]}, {pack.vocab_size:,} "
            f"entries) than model.tokenizer_path gives ({tokenizer.sha256[:12]}, {tokenizer.vocab_size:,} entries): "
            "pack it again or name that tokenizer"
        )


def verify(pack: Pack) -> None:
    """Reads all files. Raises UserError when a checksum is not the metadata's."""
    for name, expected in pack.sha256.items():
        with open(f"{pack.path}/{name}", "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                raise UserError(f"pack {pack.path!r} is damaged: the checksum of {name} is not the one in {METADATA}")
