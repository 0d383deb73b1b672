"""The holdout: documents that are never trained on, chosen by a hash of their key.

A document's key depends on its content or name only (see `documents.Document.key`), so a streamed source, its packs and
every later reading of either hold out the same documents, and a larger percentage holds out those of a smaller one
and more.
"""

import hashlib
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

import numpy as np

Point = TypeVar("Point", int, np.ndarray)

_PURPOSE = b"titan_loom holdout\0"


def key_point(key: str) -> int:
    """Where `key` lies in the range of 64 bits: uniform over keys, the same on every machine."""
    # A lone surrogate, which JSON may hold, has no UTF-8.
    digest = hashlib.sha256(_PURPOSE + key.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "little")


@dataclass(frozen=True)
class Holdout:
    """Which documents a reader gets: those outside the holdout of `percent`, or with `inside` those in it."""

    percent: float = 0.0
    inside: bool = False

    def keeps(self, points: Point) -> Point:
        """Whether documents at `points` (an int, or a uint64 array) are for this reader."""
        # The percentage is read as the decimal fraction that it prints as, as shares are.
        limit = int(Fraction(str(self.percent)) * 2**64 / 100)
        return (points < limit) == self.inside
