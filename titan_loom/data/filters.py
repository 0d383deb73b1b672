"""Which documents of a source are trained on: by language, length and licence as `[data.sources.<name>]` says, and by
the holdout. A dropped document is counted once, under the first reason that applies.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from titan_loom.config.job_config import Source
from titan_loom.data.documents import Document, Format, Row
from titan_loom.data.holdout import Holdout, key_point

REASONS = ("languages", "min_chars", "max_chars", "licenses", "holdout")
"""Why a document is dropped, in the order that they are looked at: the names of the keys."""


@dataclass(frozen=True)
class Filter:
    """The filters of one source.

    Names of languages and licences are compared without regard to case. A document of unknown language or licence is
    dropped when that is filtered, and one with several licences unless all are allowed.
    """

    languages: frozenset[str] = frozenset()
    min_chars: int = 0
    max_chars: int | None = None
    licenses: frozenset[str] = frozenset()
    license_column: str = "license"
    holdout: Holdout = field(default_factory=Holdout)

    def reason(self, document: Document, row: Row) -> int | None:
        """The number in `REASONS` of why `document` of `row` is dropped; None when it is kept."""
        if self.languages and _lower(document.language) not in self.languages:
            return 0
        if document.num_chars < self.min_chars:
            return 1
        if self.max_chars is not None and document.num_chars > self.max_chars:
            return 2
        if self.licenses and not self._has_allowed_license(document, row):
            return 3
        if (self.holdout.percent or self.holdout.inside) and not self.holdout.keeps(key_point(document.key)):
            return 4
        return None

    def _has_allowed_license(self, document: Document, row: Row) -> bool:
        column, _, leaf = self.license_column.partition(".")
        found = document.fields.get(leaf) if leaf else row.get(column)
        names = found if isinstance(found, list) else [found]
        return bool(names) and all(_lower(name) in self.licenses for name in names)


def _lower(name: Any) -> str:
    """For comparing; anything but a text is an unknown name."""
    return name.lower() if isinstance(name, str) else ""


def kept_documents(
    form: Format, keep: Filter, row: Row, source: str, filtered: list[int], first: int = 0
) -> Iterator[tuple[int, Document]]:
    """(number in the row, document) of what `keep` lets through, from document `first` of the row on; `filtered` counts
    the others as they are met."""
    for number, document in enumerate(form.read(row, source)):
        if number < first:
            continue
        reason = keep.reason(document, row)
        if reason is None:
            yield number, document
        else:
            filtered[reason] += 1


def build_filter(source: Source, holdout: Holdout) -> Filter:
    """The filter that `source` describes, for a reader on one side of `holdout`."""
    return Filter(
        languages=frozenset(name.lower() for name in source.languages),
        min_chars=source.min_chars,
        max_chars=source.max_chars,
        licenses=frozenset(name.lower() for name in source.licenses),
        license_column=source.license_column,
        holdout=holdout,
    )


def has_filters(source: Source) -> bool:
    """Whether `source` leaves out any document besides the holdout."""
    return bool(source.languages or source.min_chars or source.max_chars is not None or source.licenses)


def filter_columns(source: Source, form: Format) -> tuple[str, ...]:
    """Columns that the filters of `source` need, in addition to those that its format needs."""
    columns = []
    if source.languages and not {"language", "files.language"} & set(form.optional):  # those are guessed from the name
        columns.append("language")
    if source.licenses:
        columns.append(source.license_column)
    return tuple(columns)


def describe_counts(filtered: Sequence[int]) -> str:
    """Counts of the reasons of one source in words."""
    return ", ".join(f"{reason} {count:,}" for reason, count in zip(REASONS, filtered, strict=True) if count) or "none"


def count_by_reason(source_names: list[str], counts: list[int]) -> dict[str, dict[str, int]]:
    """Counts of all reasons, source after source, as a table of those that are not 0."""
    table = {}
    for i, name in enumerate(source_names):
        of_source = zip(REASONS, counts[i * len(REASONS) : (i + 1) * len(REASONS)], strict=True)
        table[name] = {reason: count for reason, count in of_source if count}
    return {name: reasons for name, reasons in table.items() if reasons}
