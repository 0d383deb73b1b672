"""Text to token ids and back, by a `tokenizer.json` of the tokenizers library; the default ships with the package.

Text is text: `<|eos|>` written in a document is encoded as characters, never as the special token. Whatever truncation,
padding or template the file asks for is off; EOS is appended to every document, and nothing is prepended.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers

from titan_loom.data.words import Words, has_known_characters, has_known_words
from titan_loom.errors import UserError

DEFAULT_PATH = Path(__file__).parent.parent / "assets" / "tokenizer"
PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2

# Every byte that UTF-8 has: all of one character and, by every 64th character, all that may begin one.
_ALL_BYTES = "".join(chr(i) for i in [*range(0x100), *range(0x100, 0x110000, 64)] if not 0xD800 <= i < 0xE000)


class Tokenizer:
    """A tokenizer made from the text of a `tokenizer.json`. Raises ValueError when it is none.

    Attributes:
        vocab_size: entries, special tokens included.
        max_id: the largest id.
        eos_id: id of `<|eos|>`, None when there is none.
        text: the file's.
        sha256: of the text, hexadecimal.
    """

    def __init__(self, text: str):
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # The library raises nothing more specific.
            raise ValueError(str(error)) from error
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.text = text
        self._words = Words(self._tokenizer) if has_known_words(text) else None
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        self.max_id: int = max(self._tokenizer.get_vocab().values(), default=-1)
        self.eos_id = self.id_of(EOS)
        self.sha256 = hashlib.sha256(text.encode()).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text and EOS, int32."""
        by_words = [self._words is not None and has_known_characters(text) for text in texts]
        others = [text for text, is_by_words in zip(texts, by_words, strict=True) if not is_by_words]
        encodings = iter(self._tokenizer.encode_batch_fast(others, add_special_tokens=False))
        return [
            self._words.encode(text, self.eos_id)
            if is_by_words
            else np.array([*next(encodings).ids, self.eos_id], dtype=np.int32)
            for text, is_by_words in zip(texts, by_words, strict=True)
        ]

    def id_of(self, token: str) -> int | None:
        """The id of an entry, None when there is none."""
        return self._tokenizer.token_to_id(token)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`, special tokens visible."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def __reduce__(self):
        # The library's own pickle forgets `encode_special_tokens`.
        return Tokenizer, (self.text,)


def load_tokenizer(path: str | None = None) -> Tokenizer:
    """The tokenizer in folder `path` (or the file `path`); None is the packaged one.

    Raises UserError when there is no such file or it holds no tokenizer.
    """
    location = DEFAULT_PATH if path is None else Path(os.path.expanduser(path))
    file = location / "tokenizer.json" if os.path.isdir(location) else location
    key = f"model.tokenizer_path = {path!r}"
    if not os.path.isfile(file):
        raise UserError(f"{key}: {file} does not exist, give a folder that holds a tokenizer.json")
    try:
        return Tokenizer(file.read_text("utf-8"))
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{key}: {file} is no tokenizer of the tokenizers library ({reason})") from error


def check_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises UserError unless `tokenizer` has `vocab_size` entries, with ids below that and 2 for `<|eos|>`, and can
    encode any text."""
    if tokenizer.vocab_size != vocab_size:
        raise UserError(
            f"model.tokenizer_path: the tokenizer has {tokenizer.vocab_size:,} entries, but the model's vocab_size is "
            f"{vocab_size:,} and the two must be equal"
        )
    if tokenizer.eos_id != EOS_ID:
        found = "is missing" if tokenizer.eos_id is None else f"has id {tokenizer.eos_id}"
        raise UserError(f"model.tokenizer_path: {EOS} {found} in the tokenizer, but must have id {EOS_ID}")
    if tokenizer.max_id >= vocab_size:
        raise UserError(
            f"model.tokenizer_path: the tokenizer has the id {tokenizer.max_id:,}, but ids must be below the model's "
            f"vocab_size, {vocab_size:,}"
        )
    try:
        (ids,) = tokenizer.encode_batch([_ALL_BYTES])
    except Exception as error:  # The library raises nothing more specific.
        reason = f"unknown words stop it ({str(error).splitlines()[0]})"
        raise UserError(f"model.tokenizer_path: the tokenizer must encode any text, but {reason}") from error
    if len(ids) == 1:
        raise UserError("model.tokenizer_path: the tokenizer must encode any text, but gives nothing for all bytes")
