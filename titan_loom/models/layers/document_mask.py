"""Where the documents of a packed row lie, for layers that must not look beyond the document of a token.

Everything follows from one tensor: the position of each token in its document. It is dense and of fixed shape, computed
in integers on the tokens' device, so that it costs no synchronisation and a compiled block sees nothing that changes.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

BLOCK_SIZE = 128  # side of the squares of the attention matrix that FlexAttention computes or leaves out


class Documents(NamedTuple):
    """The documents of a batch of rows. Every row starts a document; none continues in the next row."""

    positions: Tensor
    """(batch, seq) int64: position of the token in its document, 0 for the first."""

    block_mask: BlockMask | None
    """The same for FlexAttention, on devices where attention runs through it; None selects attention by document."""

    padding: Tensor | None = None
    """(batch, seq) bool: True where there is no token of any document, only filling; None: nowhere."""


def documents_at(positions: Tensor, padding: Tensor | None = None) -> Documents:
    """The documents of tokens at `positions`, (batch, seq) int64, in them."""
    return Documents(positions, block_mask(positions) if positions.is_cuda else None, padding)


def positions_by_eos(tokens: Tensor, eos_id: int) -> Tensor:
    """Positions, (batch, seq) int64, of `tokens`, (batch, seq) int64, in documents which `eos_id` ends."""
    return positions_in_documents(F.pad(tokens[:, :-1] == eos_id, (1, 0), value=True))


def positions_in_documents(is_first: Tensor) -> Tensor:
    """Positions, (batch, seq) int64, in documents whose first tokens are True in `is_first`, (batch, seq) bool."""
    index = torch.arange(is_first.shape[1], device=is_first.device)
    return index - (index * is_first).cummax(1).values


def block_mask(positions: Tensor) -> BlockMask:
    """FlexAttention's mask of causal attention inside each document, from `positions`: (batch, seq) int64.

    What `create_block_mask` would find by evaluating all seq x seq pairs follows from the documents' starts alone: the
    first key that a block of queries sees is the start of its first query's document.
    """
    seq = positions.shape[1]
    starts = torch.arange(seq, device=positions.device) - positions
    starts = F.pad(starts, (0, -seq % BLOCK_SIZE), value=seq)  # so that no incomplete block counts as full
    first_key = torch.arange(0, seq, BLOCK_SIZE, device=positions.device)  # of each block of keys
    first_query = first_key.unsqueeze(-1)

    # (batch, query blocks, key blocks): with a pair of query and key to compute, and with all pairs
    reached = (starts[:, first_query] < first_key + BLOCK_SIZE) & (first_key <= first_query)
    full = (starts[:, first_query + BLOCK_SIZE - 1] <= first_key) & (first_key < first_query)

    def same_document(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query - key <= positions[batch, query])

    return BlockMask.from_kv_blocks(
        *_counts_and_indices(reached & ~full),
        *_counts_and_indices(full),
        BLOCK_SIZE=BLOCK_SIZE,
        mask_mod=same_document,
        seq_lengths=(seq, seq),
    )


def _counts_and_indices(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Of (batch, query blocks, key blocks) bool: how many key blocks each query block has, and all, those first."""
    order = chosen.byte().argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32).unsqueeze(1), order.int().unsqueeze(1)
