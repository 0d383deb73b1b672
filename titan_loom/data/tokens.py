"""The endless tokenised documents of one lane and source, each ended by EOS: from rows, or out of a pack.

Documents are tokenised in batches, because the tokenizer then releases the GIL and costs less a call; every document
remembers the row that it came from, so neither the result nor the position depends on the batches.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np

from titan_loom.data.documents import Document
from titan_loom.data.filters import REASONS, Holdout, describe_counts
from titan_loom.data.packs import Pack
from titan_loom.data.rows import Order, RowState, RowStream
from titan_loom.data.source_reader import SourceReader
from titan_loom.data.tokenizer import Tokenizer
from titan_loom.errors import UserError
from titan_loom.tools.random import permutation

Counts = tuple[int, ...]
"""Dropped documents by reason, in the order of `REASONS`."""

NO_COUNTS: Counts = (0,) * len(REASONS)

PackState = tuple[int, int]
"""(epoch, place in the lane's documents of that epoch)."""


class TokenisedDocument(NamedTuple):
    tokens: np.ndarray
    """(length,), EOS included: int32, or the pack's type."""

    row_state: RowState | PackState
    """State before the row that the document came from, or place in the pack."""

    index: int
    """Its number among the documents of that row, dropped ones counted."""

    filtered: Counts
    """Documents dropped before it, since the start of the run."""


def tokenise(
    rows: RowStream, tokenizer: Tokenizer, first: int = 0, filtered: Counts = NO_COUNTS
) -> Iterator[TokenisedDocument]:
    """The documents of `rows`, those of the first row from number `first` on; `filtered` were dropped before.

    Raises UserError when the rows give no documents.
    """
    documents = _kept_documents(rows, first, list(filtered))
    while batch := list(islice(documents, rows.source.encode_batch_size)):
        tokens = tokenizer.encode_batch([document.text for document, *_ in batch])
        for ids, (_, *position) in zip(tokens, batch, strict=True):
            yield TokenisedDocument(ids, *position)


def _kept_documents(
    rows: RowStream, first: int, filtered: list[int]
) -> Iterator[tuple[Document, RowState, int, Counts]]:
    source, last_epoch = rows.source, rows.epoch
    for row, state in rows:
        for index, document in source.documents(row, filtered, first):
            last_epoch = rows.epoch
            yield document, state, index, tuple(filtered)
        first = 0
        if rows.epoch - last_epoch > rows.epochs_to_meet_all:
            raise UserError(
                f"{source.key}: no row gives a document in format {source.form.name!r}: "
                f"all are blank, vendored, binary, not UTF-8 or filtered ({describe_counts(filtered)})"
            )


def read_pack(
    source: SourceReader, order: Order, lane: int, state: PackState | None = None
) -> Iterator[TokenisedDocument]:
    """The documents of a packed source in one lane: in every epoch each comes once, over all lanes, in an order drawn
    from (seed, source, epoch).

    The tokens are views of the memory map. An epoch's order is drawn at once, which takes some 30 bytes a document
    while it is. Raises UserError when there is no document on this side of the holdout.
    """
    pack, holdout = source.pack, source.keep.holdout
    tokens, starts = pack.array("tokens"), pack.array("starts")
    epoch, first = state or (0, 0)
    while True:
        places = _epoch_order(pack, holdout, order.seed, source.name, epoch, order.lanes)
        if not (places >= 0).any():
            part = "the holdout of " if holdout.inside else "nothing outside the holdout of "
            raise UserError(
                f"{source.key}.path gives no documents: of {pack.num_documents:,}, "
                f"{part}data.holdout_percent = {holdout.percent:g} is asked for"
            )
        mine = places[lane :: order.lanes]
        mine = mine[mine >= 0]
        for place, document in enumerate(mine[first:], first):
            yield TokenisedDocument(tokens[starts[document] : starts[document + 1]], (epoch, place), 0, NO_COUNTS)
        epoch, first = epoch + 1, 0


@lru_cache(maxsize=2)
def _epoch_order(pack: Pack, holdout: Holdout, seed: int, source_name: str, epoch: int, lanes: int) -> np.ndarray:
    """All documents of an epoch in order, int64; -1 is a place without a document."""
    documents = np.flatnonzero(holdout.keeps(pack.array("points")))
    # With fewer documents than lanes there are places without one, so that every lane has its turn in some epoch.
    missing = max(0, lanes - len(documents))
    documents = np.concatenate([documents, np.full(missing, -1)])
    return documents[permutation(len(documents), seed, "documents", source_name, epoch)]
