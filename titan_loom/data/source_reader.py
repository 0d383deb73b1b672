"""One configured source, ready to be read: its rows, and of each row the documents that are trained on."""

from collections.abc import Iterator

from titan_loom.config.job_config import Source
from titan_loom.data.documents import Document, Row, get_format
from titan_loom.data.filters import Filter, Holdout, filter_columns
from titan_loom.data.packs import Pack
from titan_loom.data.readers import Shard, open_rows
from titan_loom.data.retry import Access


class SourceReader:
    """The source called `name`, for a reader on one side of `holdout`.

    Attributes:
        shards: what the lanes share out, the same for every lane.
        pack: documents that are tokenised already; there are then no rows.
    """

    def __init__(
        self,
        name: str,
        source: Source,
        access: Access,
        *,
        holdout: Holdout | None = None,
        shards: tuple[Shard, ...] = (),
        pack: Pack | None = None,
    ):
        self.name = name
        self.key = f"data.sources.{name}"
        self.access = access
        self.shards = shards
        self.pack = pack
        self.encode_batch_size = source.encode_batch_size
        self.form = get_format(name, source.format)
        self.keep = Filter(source, holdout or Holdout())
        columns = *self.form.columns, *self.form.optional, *filter_columns(source, self.form)
        self._columns = tuple(dict.fromkeys(columns))

    def rows(self, shard: Shard, start_row: int = 0) -> Iterator[Row]:
        """The rows of `shard` from its row `start_row` on. Raises as `open_rows` does."""
        return open_rows(shard, start_row, self._columns, self.access, self.form.texts)

    def documents(self, row: Row, filtered: list[int], first: int = 0) -> Iterator[tuple[int, Document]]:
        """(number in the row, document) of what is kept, from document `first` of the row on; `filtered` counts the
        others by reason as they are met."""
        for number, document in enumerate(self.form.read(row, self.key)):
            if number < first:
                continue
            reason = self.keep.reason(document, row)
            if reason is None:
                yield number, document
            else:
                filtered[reason] += 1
