"""Which documents of a source are trained on: by language, length and licence as `[data.sources.<name>]` says, and by
the holdout. A dropped document is counted once, under the first reason that applies.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

import numpy as np

from titan_loom.config.job_config import Source
from titan_loom.data.documents import Document, Format, Row

REASONS = ("languages", "min_chars", "max_chars", "licenses", "holdout")
"""Why a document is dropped, in the order that they are looked at: the names of the keys."""

Point = TypeVar("Point", int, np.ndarray)

_PURPOSE = b"titan_loom holdout\0"


@dataclass(frozen=True)
class Holdout:
    """Which documents a reader gets: those outside the holdout of `percent`, or with `inside` those in it.

    A hash of a document's key decides, which depends on its content or name only (see `documents.Document.key`), so a
    streamed source, its packs and every later reading of either hold out the same documents, and a larger percentage
    holds out those of a smaller one and more.
    """

    percent: float = 0.0
    inside: bool = False

    def keeps(self, points: Point) -> Point:
        """Whether documents at `points` (an int, or a uint64 array) are for this reader."""
        # The percentage is read as the decimal fraction that it prints as, as shares are.
        limit = int(Fraction(str(self.percent)) * 2**64 / 100)
        return (points < limit) == self.inside


def key_point(key: str) -> int:
    """Where `key` lies in the range of 64 bits: uniform over keys, the same on every machine."""
    # A lone surrogate, which JSON may hold, has no UTF-8.
    digest = hashlib.sha256(_PURPOSE + key.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "little")


class Filter:
    """The filters of `source`, for a reader on one side of `holdout`.

    Names of languages and licences are compared without regard to case. A document of unknown language or licence is
    dropped when that is filtered, and one with several licences unless all are allowed.
    """

    def __init__(self, source: Source, holdout: Holdout):
        self.holdout = holdout
        self._source = source
        self._languages = {name.lower() for name in source.languages}
        self._licenses = {name.lower() for name in source.licenses}

    def reason(self, document: Document, row: Row) -> int | None:
        """The number in `REASONS` of why `document` of `row` is dropped; None when it is kept."""
        min_chars, max_chars = self._source.min_chars, self._source.max_chars
        if self._languages and _lower(document.language) not in self._languages:
            return 0
        if document.num_chars < min_chars:
            return 1
        if max_chars is not None and document.num_chars > max_chars:
            return 2
        if self._licenses and not self._has_allowed_license(document, row):
            return 3
        if (self.holdout.percent or self.holdout.inside) and not self.holdout.keeps(key_point(document.key)):
            return 4
        return None

    def _has_allowed_license(self, document: Document, row: Row) -> bool:
        column, _, leaf = self._source.license_column.partition(".")
        found = document.fields.get(leaf) if leaf else row.get(column)
        names = found if isinstance(found, list) else [found]
        return bool(names) and all(_lower(name) in self._licenses for name in names)


def _lower(name: Any) -> str:
    """For comparing; anything but a text is an unknown name."""
    return name.lower() if isinstance(name, str) else ""


def has_filters(source: Source) -> bool:
    """Whether `source` leaves out any document besides the holdout."""
    return bool(source.languages or source.min_chars or source.max_chars is not None or source.licenses)


def filter_columns(source: Source, form: Format) -> dict[str, str]:
    """Columns that the filters of `source` need besides those of its format, each with the key that asks for it."""
    columns = {}
    if source.languages and not {"language", "files.language"} & set(form.optional):  # those are guessed from the name
        columns["language"] = "languages"
    if source.licenses:
        columns[source.license_column] = "license_column"
    return columns


def describe_counts(filtered: Sequence[int]) -> str:
    """Counts of the reasons of one source in words."""
    return ", ".join(f"{reason} {count:,}" for reason, count in zip(REASONS, filtered, strict=True) if count) or "none"


def count_by_reason(source_names: list[str], counts: list[int]) -> dict[str, dict[str, int]]:
    """Counts of all reasons, source after source, as a table of those that are not 0."""
    counted = iter(counts)
    table = {name: {reason: next(counted) for reason in REASONS} for name in source_names}
    found = {name: {reason: count for reason, count in reasons.items() if count} for name, reasons in table.items()}
    return {name: reasons for name, reasons in found.items() if reasons}
