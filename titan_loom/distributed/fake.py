"""A process group of which only rank 0 exists, and what a step takes there: bytes in use and bytes communicated."""

import weakref
from collections import Counter
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COLLECTIVES = {
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "alltoall": "all-to-all",
}
"""By what the names of c10d's operators contain, underscores aside."""


def init_fake_process_group(world_size: int) -> None:
    """Be rank 0 of `world_size`; collectives return at once and communicate nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)


class Meter(TorchDispatchMode):
    """While entered, follows the bytes of every storage that operations make, and counts collectives.

    `live` and `peak` are bytes, `calls` and `nbytes` go by the kind of collective; the bytes of one are those of its
    largest tensor, the whole one of an all-gather or reduce-scatter.
    """

    def __init__(self):
        super().__init__()
        self.live = 0
        self._sizes: dict[int, int] = {}  # of the storages that exist
        self.reset()

    def reset(self) -> None:
        """Forget the peak and the collectives so far."""
        self.peak = self.live
        self.calls, self.nbytes = Counter(), Counter()

    def __enter__(self) -> "Meter":
        # FSDP2 frees and allocates gathered weights by resizing their storages, which no dispatcher sees.
        self._resize = resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = resize(storage, size)
            if storage._cdata in self._sizes:
                self._set(storage._cdata, size)
            return result

        torch.UntypedStorage.resize_ = resize_
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(kind, error, traceback)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes back as operations on the local tensors
        result = op(*args, **(kwargs or {}))
        if op.namespace in ("c10d", "_c10d_functional"):
            self._count(op.name().replace("_", ""), tree_leaves((args, kwargs, result)))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._follow(leaf.untyped_storage())
        return result

    def _count(self, name: str, leaves: list) -> None:
        kind = next((kind for word, kind in COLLECTIVES.items() if word in name), None)
        if kind is not None:  # else a wait or a barrier
            self.calls[kind] += 1
            self.nbytes[kind] += max(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            weakref.finalize(storage, self._forget, key)
            self._set(key, storage.nbytes())

    def _set(self, key: int, size: int) -> None:
        self.live += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak = max(self.peak, self.live)

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key)
