"""Tokens to sequences: n + 1 tokens with stride n, so that every token but the stream's first is a target exactly once.

The state is the place of the next sequence's first token: its row, the document in the row, the token in the
document. No left-over tokens are stored; a resume tokenises that one document again.
"""

from collections.abc import Iterator

import numpy as np

from titan_loom.data.rows import RowState
from titan_loom.data.tokens import NO_COUNTS, Counts, TokenisedDocument

SequenceState = tuple[RowState, int, int]
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
        self._row_state, self._document, self._offset = state
        self._filtered = tuple(filtered)
        self._tokens: np.ndarray | None = None

    @property
    def filtered(self) -> Counts:
        """Documents dropped before the place of `state`, since the start of the run."""
        return self._filtered

    def state(self) -> SequenceState:
        """Place of the next `read`'s first token."""
        return self._row_state, self._document, self._offset

    def read_row(self, num_tokens: int) -> list[np.ndarray]:
        """What fills a row of `num_tokens` inputs: one run of tokens, each but the last an input."""
        return [self.read(num_tokens)]

    def read(self, num_tokens: int) -> np.ndarray:
        """The next `num_tokens` + 1 tokens, int32; the last is also the first of the next read."""
        pieces, needed = [], num_tokens + 1
        while needed:
            piece = self._rest_of_document()[:needed]
            self._offset += len(piece)
            needed -= len(piece)
            pieces.append(piece)
        self._offset -= 1
        return np.concatenate(pieces, dtype=np.int32)

    def _rest_of_document(self) -> np.ndarray:
        if self._tokens is None:
            self._next_document()
        elif self._offset == len(self._tokens):
            self._next_document()
            self._offset = 0
        return self._tokens[self._offset :]

    def _next_document(self) -> None:
        self._tokens, self._row_state, self._document, self._filtered = next(self._documents)
