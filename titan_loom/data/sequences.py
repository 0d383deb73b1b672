"""Tokens to sequences: n + 1 tokens with stride n, so that every token but the stream's first is a target exactly once.

The state is the place of the next sequence's first token: its row, the document in the row, the token in the
document. No left-over tokens are stored; a resume tokenises that one document again.
"""

from collections.abc import Iterator

import numpy as np

from titan_loom.data.rows import RowState
from titan_loom.data.tokens import NO_COUNTS, Counts, PackState, TokenisedDocument

SequenceState = tuple[RowState | PackState, int, int]
"""(state before the row, document in the row, token in the document)."""


class SequenceStream:
    """Cuts a token stream into sequences.

    Args:
        documents: the token stream, standing at the document that `state` names.
        state: place of the first token to read.
        filtered: documents dropped before it.
    """

    def __init__(self, documents: Iterator[TokenisedDocument], state: SequenceState, filtered: Counts = NO_COUNTS):
        self._documents = documents
        self._row_state, self._document, self._token = state
        self._tokens: np.ndarray | None = None
        self.filtered = tuple(filtered)
        """Documents dropped before the place of `state`, since the start of the run."""

    def state(self) -> SequenceState:
        """Place of the next row's first token."""
        return self._row_state, self._document, self._token

    def read_row(self, num_tokens: int) -> list[np.ndarray]:
        """What fills a row of `num_tokens` inputs: one run of `num_tokens` + 1 tokens, int32; the last is also the
        first of the next row."""
        pieces, needed = [], num_tokens + 1
        while needed:
            if self._tokens is None:
                self._next_document()
            elif self._token == len(self._tokens):
                self._next_document()
                self._token = 0
            piece = self._tokens[self._token :][:needed]
            self._token += len(piece)
            needed -= len(piece)
            pieces.append(piece)
        self._token -= 1
        return [np.concatenate(pieces, dtype=np.int32)]

    def _next_document(self) -> None:
        self._tokens, self._row_state, self._document, self.filtered = next(self._documents)
