"""`titan-loom tokenizer`: trains a byte-level BPE tokenizer on any sources, by default on the text that every machine
has.

Each digit is its own token; `<|pad|>`, `<|bos|>`, `<|eos|>` are 0, 1, 2; every byte is in the vocabulary, so nothing
is unknown. The same documents give the same file, byte for byte.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tokenizers
import tyro
from tokenizers import decoders, models, pre_tokenizers, trainers

from titan_loom.data import embedded
from titan_loom.data.documents import FORMATS, Format
from titan_loom.data.readers import Shard, column_types, open_rows
from titan_loom.data.sources import find_parts
from titan_loom.data.tokenizer import BOS, EOS, PAD
from titan_loom.errors import UserError

_MIN_VOCAB_SIZE = 256 + 3
"""Every byte and the special tokens."""


@dataclass(frozen=True, kw_only=True)
class TokenizerArgs:
    """Train a byte-level BPE tokenizer."""

    path: tuple[str, ...] = embedded.NAMES
    """What to train on: embedded sources, files or folders (parquet, jsonl, text)."""

    out: str = "tokenizer"
    """Folder for `tokenizer.json` and `tokenizer_config.json`."""

    vocab_size: int = 8192
    """Entries, special tokens included."""


def main(argv: list[str]) -> None:
    """Trains as the command line `argv` says. Raises UserError for sources that cannot be read and impossible sizes."""
    args = tyro.cli(TokenizerArgs, prog="titan-loom tokenizer", args=argv, config=(tyro.conf.OmitArgPrefixes,))
    tokenizer = train(documents(args.path), args.vocab_size)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "tokenizer.json").write_text(tokenizer.to_str(pretty=False), "utf-8")
    (out / "tokenizer_config.json").write_text(json.dumps(_transformers_config(), indent=2) + "\n", "utf-8")
    print(f"{args.vocab_size:,} entries written to {out}", file=sys.stderr)


def documents(paths: tuple[str, ...]) -> Iterator[str]:
    """All documents of the sources, in order; each source is read in the first format that its columns allow."""
    for path in paths:
        parts = find_parts("path", path, "file")
        form = _guess_format(path, set(column_types(parts.parts[0])))
        for part in parts.parts:
            for row in open_rows(Shard(part), 0, form.columns + form.optional, texts=form.texts):
                yield from (document.text for document in form.read(row, f"path = {path!r}"))


def _guess_format(path: str, columns: set[str]) -> Format:
    for form in FORMATS.values():
        if columns.issuperset(form.columns):
            return form
    needed = " or ".join(f"{name} ({', '.join(form.columns)})" for name, form in FORMATS.items())
    raise UserError(
        f"path = {path!r} has the columns {', '.join(sorted(columns))}: needed are those of a format, {needed}"
    )


def train(texts: Iterator[str], vocab_size: int) -> tokenizers.Tokenizer:
    """A tokenizer of exactly `vocab_size` entries, or UserError."""
    if vocab_size < _MIN_VOCAB_SIZE:
        raise UserError(
            f"vocab_size = {vocab_size} is too small: at least {_MIN_VOCAB_SIZE} (all bytes and 3 special tokens)"
        )
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        found = tokenizer.get_vocab_size()
        raise UserError(f"vocab_size = {vocab_size:,} cannot be reached: the text gives at most {found:,} entries")
    return tokenizer


def _transformers_config() -> dict:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
    }
