"""Writing DCP checkpoints so that they can be checked: every file that a rank writes, it sums up."""

from torch.distributed.checkpoint import FileSystemWriter, Metadata, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from titan_loom.training.checkpoint_files import checksum


class TensorWriter(FileSystemWriter):
    """Writes a checkpoint's tensors to disk, durably.

    After the save `checksums` has, by file name, what this rank has written.
    """

    def __init__(self, path: str):
        super().__init__(path, sync_files=True)
        self.checksums: dict[str, dict[str, int | str]] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            written = super().write_data(plan, planner)
        except Exception as error:
            raise _os_error_behind(error) from error
        self._sum_up({result.storage_data.relative_path for result in written.value()})
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        self._sum_up({".metadata"})

    def _sum_up(self, names: set[str]) -> None:
        self.checksums |= {name: checksum(self.path / name) for name in sorted(names)}


def _os_error_behind(error: Exception) -> Exception:
    """What the operating system said, where torch.save put its zip writer's "unexpected pos" in place of "no space".

    DCP pickles what is raised here, and a pickled exception loses what it was raised from.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return error
