"""Reading DCP checkpoints without trusting them.

DCP's `.metadata` is a pickle and plain `dcp.load` runs whatever code it holds. Ours contain tensors only, so the few
classes that describe tensors are all that is let through.
"""

import pickle
from typing import Any

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

_DESCRIPTIONS = {
    "pathlib": {"PosixPath", "PurePosixPath"},
    "torch": {"Size", "float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
}


class _DescriptionUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _DESCRIPTIONS.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint of tensors")
        return super().find_class(module, name)


class TensorReader(FileSystemReader):
    """Reads checkpoints that hold tensors only; anything else raises `pickle.UnpicklingError`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            metadata = _DescriptionUnpickler(file).load()
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
