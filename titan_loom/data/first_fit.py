"""Documents to rows of whole chunks: documents are cut into chunks of at most seq_len + 1 tokens, each of which then is
a document of its own, and every chunk of an epoch comes once.

A row takes the first of the next `LOOK_AHEAD` chunks that fits what is left of it, until none does; the rest is
padding. The oldest chunk begins a row, so none waits for more than that many rows. The state is the place of the oldest
chunk and which of those after it are gone already: a resume reads them all again and leaves those out.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from titan_loom.data.rows import RowState
from titan_loom.data.tokens import NO_COUNTS, Counts, PackState, TokenisedDocument

LOOK_AHEAD = 64

FirstFitState = tuple[RowState | PackState, int, int, list[int]]
"""(state before the row, document in the row, chunk in the document) of the oldest chunk that no row has, and how many
chunks after it those are that rows have."""


class _Chunk(NamedTuple):
    tokens: np.ndarray
    number: int
    """Among the chunks that this stream has read."""

    document: TokenisedDocument
    index: int
    """Among the chunks of the document."""


class FirstFitStream:
    """Fills rows with whole chunks of documents.

    Args:
        documents: the token stream, standing at the document that `state` names.
        state: where to go on; (state of the documents, 0, 0, []) is the start.
        seq_len: inputs of a row: a chunk of n tokens takes n - 1, as its last is a label only. Chunks of one token are
            left out.
        filtered: documents dropped before the place of `state`.
    """

    def __init__(
        self,
        documents: Iterator[TokenisedDocument],
        state: FirstFitState,
        filtered: Counts = NO_COUNTS,
        *,
        seq_len: int,
    ):
        self._start = state
        self._filtered = tuple(filtered)
        *_, first_chunk, taken = state
        self._chunks = _chunks(documents, first_chunk, seq_len + 1)
        self._taken = frozenset(taken)
        self._num_read = 0
        self._waiting: list[_Chunk] = []

    @property
    def filtered(self) -> Counts:
        """Documents dropped before the place of `state`, since the start of the run."""
        return self._waiting[0].document.filtered if self._waiting else self._filtered

    def state(self) -> FirstFitState:
        """What the next row goes on from."""
        if not self._waiting:  # nothing was read yet
            return self._start
        first = self._waiting[0]
        waiting = {chunk.number for chunk in self._waiting}
        taken = [number - first.number for number in range(first.number, self._num_read) if number not in waiting]
        return first.document.row_state, first.document.index, first.index, taken

    def read_row(self, num_tokens: int) -> list[np.ndarray]:
        """The chunks of a row of `num_tokens` inputs, in order; the first always fits a row of `seq_len`."""
        row, left = [], num_tokens
        while (chunk := self._take(left)) is not None:
            row.append(chunk.tokens)
            left -= len(chunk.tokens) - 1
        return row

    def _take(self, room: int) -> _Chunk | None:
        while len(self._waiting) < LOOK_AHEAD:
            chunk = next(self._chunks)
            self._num_read += 1
            if chunk.number not in self._taken:
                self._waiting.append(chunk)
        fitting = (i for i, chunk in enumerate(self._waiting) if len(chunk.tokens) - 1 <= room)
        place = next(fitting, None)
        return None if place is None else self._waiting.pop(place)


def _chunks(documents: Iterator[TokenisedDocument], first: int, size: int) -> Iterator[_Chunk]:
    """Chunks of at most `size` tokens, of the first document from chunk `first` on."""
    number = 0
    for document in documents:
        for index in range(first, -(-len(document.tokens) // size)):
            tokens = document.tokens[index * size : (index + 1) * size]
            if len(tokens) > 1:
                yield _Chunk(tokens, number, document, index)
                number += 1
        first = 0
