"""The n-gram memory: two tables, looked up by a hash of the last two and the last four token ids.

The hash of a window of n ids, oldest first, is in 64-bit integers, multiplication wrapping and >> shifting in zeros:

    h <- n;   for each id:  h <- (h XOR id) * 0x9E3779B97F4A7C15;  h <- h XOR (h >> 32);   row = (h mod 2^63) mod rows

Ids before the start of the sequence are -1. Whoever decodes step by step passes the last three ids as `history` and
gets the same rows. With the tokens' positions in their documents, ids before the start of the document are -1 too.
"""

import torch
from torch import Tensor, nn

from titan_loom.models.layers.embedding import Embedding

FILLER = -1
HISTORY = 3  # ids before the current one that the longest window reads
_MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64  # 2^64 / golden ratio, odd, as a signed integer
_LOW_32_BITS = 2**32 - 1
_LOW_63_BITS = 2**63 - 1


def ngram_rows(
    ids: Tensor, num_rows: int, order: int, history: Tensor | None = None, positions: Tensor | None = None
) -> Tensor:
    """The table row of the last `order` ids at each position: (batch, seq) int64, from 0 to num_rows - 1.

    Args:
        ids: (batch, seq) int64.
        order: ids in a window, at most 4.
        history: (batch, 3) int64, the ids before `ids`, -1 where there are none. Default: none at all.
        positions: (batch, seq) int64, each token's position in its document. Default: a row is one document.
    """
    batch, seq = ids.shape
    if history is None:
        history = ids.new_full((batch, HISTORY), FILLER)
    extended = torch.cat((history, ids), dim=1)
    h = torch.full_like(ids, order)
    for back in reversed(range(order)):
        window_ids = extended[:, HISTORY - back : HISTORY - back + seq]
        if positions is not None:
            window_ids = window_ids.where(positions >= back, FILLER)
        h = (h ^ window_ids) * _MULTIPLIER
        h = h ^ ((h >> 32) & _LOW_32_BITS)  # >> copies the sign of an int64; the mask makes it shift in zeros
    return (h & _LOW_63_BITS) % num_rows


class NgramMemory(nn.Module):
    """u = W_out [bigram row ; four-gram row], and the scales by which the model adds u to its stream."""

    def __init__(self, *, dim: int, num_rows: int, columns: int, num_injections: int):
        super().__init__()
        self.injection_scales = nn.Parameter(torch.empty(num_injections))
        self.bigram_table = Embedding(num_rows, columns)
        self.fourgram_table = Embedding(num_rows, columns)
        self.out_proj = nn.Linear(2 * columns, dim, bias=False)

    def forward(self, ids: Tensor, history: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """ids: (batch, seq) int64; history and positions as for `ngram_rows`. Returns u: (batch, seq, dim)."""
        bigram = self.bigram_table(ngram_rows(ids, self.bigram_table.num_embeddings, 2, history, positions))
        fourgram = self.fourgram_table(ngram_rows(ids, self.fourgram_table.num_embeddings, 4, history, positions))
        return self.out_proj(torch.cat((bigram, fourgram), dim=-1))
