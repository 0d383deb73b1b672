"""Brings matrices whose rows lie on several ranks to one owner each, and the rows of the results back.

The owners follow from the shapes alone, so all ranks agree without asking. Either way is one `all_to_all_single`,
however many matrices there are; a rank that owns none, or has no rows of some, takes part like the others. (In 2, 4 or
8 parts, so that Newton-Schulz of one overlaps the travel of the next, a step of two gloo processes gained 0 to 2 %.)
"""

import heapq
from collections.abc import Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor


def assign_owners(shapes: Sequence[tuple[int, int]], num_ranks: int) -> list[int]:
    """The owner of each matrix: the costliest matrix first, each to the rank with the least work so far."""
    cost = [min(shape) ** 2 * max(shape) for shape in shapes]  # of a Newton-Schulz step, up to a factor
    loads = [(0, rank) for rank in range(num_ranks)]
    owners = [0] * len(shapes)
    for index in sorted(range(len(shapes)), key=lambda index: -cost[index]):
        load, owners[index] = loads[0]
        heapq.heapreplace(loads, (load + cost[index], owners[index]))
    return owners


@cache
def shard_rows(num_rows: int, num_ranks: int) -> tuple[int, ...]:
    """Rows of each rank under `Shard(0)`: equal chunks, rounded up, for as long as there are rows."""
    chunk = -(-num_rows // num_ranks)
    return tuple(max(0, min(chunk, num_rows - rank * chunk)) for rank in range(num_ranks))


class OwnerExchange:
    """The exchange of a list of matrices among the ranks of a group.

    Args:
        shapes: the full shape (m, n) of each matrix, the same on all ranks.
        group: the ranks that hold the rows, in the order of the rows.
        dtype: what travels.
    """

    def __init__(self, shapes: Sequence[tuple[int, int]], group: dist.ProcessGroup, dtype: torch.dtype):
        self._group, self._dtype = group, dtype
        rank, ranks = group.rank(), range(group.size())
        owners = assign_owners(shapes, len(ranks))
        rows = [shard_rows(num_rows, len(ranks)) for num_rows, _ in shapes]
        self._by_owner = sorted(range(len(shapes)), key=owners.__getitem__)
        self._shard_shapes = [(rows[index][rank], shapes[index][1]) for index in self._by_owner]
        owned = [index for index in self._by_owner if owners[index] == rank]
        self._owned_shapes = [shapes[index] for index in owned]
        self._owned_rows = [rows[index] for index in owned]

        # To every owner, and from every rank, goes one run of flattened shards, in the order of the matrices.
        self._shard_sizes = [num_rows * columns for num_rows, columns in self._shard_shapes]
        self._received_sizes = [[rows[index][source] * shapes[index][1] for index in owned] for source in ranks]
        self._to_owners = [0] * len(ranks)
        for index, size in zip(self._by_owner, self._shard_sizes, strict=True):
            self._to_owners[owners[index]] += size
        self._from_ranks = [sum(sizes) for sizes in self._received_sizes]

    def gather(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """This rank's rows of every matrix -> the matrices (m, n) that this rank owns."""
        packed = _pack(shards[0].new_empty(0), *(shards[index] for index in self._by_owner)).to(self._dtype)
        received = self._all_to_all(packed, self._to_owners, self._from_ranks)
        pieces = received.split([size for sizes in self._received_sizes for size in sizes])
        count = len(self._owned_shapes)
        return [torch.cat(pieces[index::count]).view(shape) for index, shape in enumerate(self._owned_shapes)]

    def scatter(self, matrices: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        """The results (m, n) for the matrices that `gather` returned -> this rank's rows of every matrix's result.

        Args:
            like: a tensor of the device and the dtype to return.
        """
        blocks = [matrix.split(rows) for matrix, rows in zip(matrices, self._owned_rows, strict=True)]
        packed = _pack(
            like.new_empty(0, dtype=self._dtype), *(block for of_rank in zip(*blocks, strict=True) for block in of_rank)
        )
        received = self._all_to_all(packed, self._from_ranks, self._to_owners).to(like.dtype)
        results = [received] * len(self._by_owner)
        for index, piece, shape in zip(
            self._by_owner, received.split(self._shard_sizes), self._shard_shapes, strict=True
        ):
            results[index] = piece.view(shape)
        return results

    def _all_to_all(self, packed: Tensor, sent: list[int], received: list[int]) -> Tensor:
        buffer = packed.new_empty(sum(received))
        dist.all_to_all_single(buffer, packed, received, sent, group=self._group)
        return buffer


def _pack(empty: Tensor, *tensors: Tensor) -> Tensor:
    """All elements in a row. The empty tensor, (0,), gives dtype and device when there are no others."""
    return torch.cat([empty, *(tensor.reshape(-1) for tensor in tensors)])
