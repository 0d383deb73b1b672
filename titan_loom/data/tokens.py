"""Rows to documents to tokens: the documents of one lane and source that its filter keeps, tokenised, each ended by
EOS.

Documents are collected and tokenised in batches, because the tokenizer then releases the GIL and costs less a call;
every document remembers the row that it came from, so neither the result nor the position depends on the batches.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from titan_loom.data.documents import Format
from titan_loom.data.filters import REASONS, Filter, describe_counts, kept_documents
from titan_loom.data.rows import RowState, RowStream
from titan_loom.data.tokenizer import Tokenizer
from titan_loom.errors import UserError

Counts = tuple[int, ...]
"""Dropped documents by reason, in the order of `REASONS`."""

NO_COUNTS: Counts = (0,) * len(REASONS)


class TokenisedDocument(NamedTuple):
    tokens: np.ndarray
    """int32, EOS included."""

    row_state: RowState
    """State before the row that the document came from."""

    index: int
    """Its number among the documents of that row, dropped ones counted."""

    filtered: Counts
    """Documents dropped before it, since the start of the run."""


@dataclass(kw_only=True, eq=False)
class TokenStream:
    """Endless iterator of `TokenisedDocument`. Raises UserError when the rows give no documents."""

    rows: RowStream
    form: Format
    keep: Filter
    tokenizer: Tokenizer
    encode_batch_size: int
    """Documents per tokenizer call."""

    first_document: int = 0
    """Documents of the first row to leave out: they were consumed before."""

    filtered: Counts = NO_COUNTS
    """What was dropped before that document."""

    def __post_init__(self):
        self._documents = self._read_documents()
        self._ready: deque[TokenisedDocument] = deque()

    def __iter__(self) -> Iterator[TokenisedDocument]:
        return self

    def __next__(self) -> TokenisedDocument:
        if not self._ready:
            batch = [next(self._documents) for _ in range(self.encode_batch_size)]
            tokens = self.tokenizer.encode_batch([text for text, _ in batch])
            self._ready += (TokenisedDocument(ids, *position) for ids, (_, position) in zip(tokens, batch, strict=True))
        return self._ready.popleft()

    def _read_documents(self) -> Iterator[tuple[str, tuple[RowState, int, Counts]]]:
        first, last_epoch = self.first_document, self.rows.epoch
        filtered, source = list(self.filtered), f"data.sources.{self.rows.source_name}"
        for row, state in self.rows:
            for index, document in kept_documents(self.form, self.keep, row, source, filtered, first):
                last_epoch = self.rows.epoch
                yield document.text, (state, index, tuple(filtered))
            first = 0
            if self.rows.epoch - last_epoch > self.rows.epochs_to_meet_all:
                raise UserError(
                    f"{source}: no row gives a document in format {self.form.name!r}: "
                    f"all are blank, vendored, binary, not UTF-8 or filtered ({describe_counts(filtered)})"
                )
