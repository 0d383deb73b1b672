"""Random numbers by purpose: every stream derives from (seed, purpose, position), never from a rank, a worker or the
clock.

The same arguments give the same numbers on every machine and in every later version: seeds come from SHA-256, and
permutations from the raw output of Philox, which NumPy keeps stable (it does not promise that of
`Generator.permutation`).
"""

import hashlib
import json

import numpy as np


def derive_seed(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for one purpose, for example `derive_seed(seed, "rows", "code", epoch)`.

    Different arguments give unrelated seeds; `"1"` and `1` are different arguments.
    """
    digest = hashlib.sha256(json.dumps([seed, *purpose]).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def permutation(length: int, seed: int, *purpose: str | int) -> np.ndarray:
    """A random order of `range(length)` as an int64 array, a pure function of the arguments."""
    keys = np.random.Philox(key=derive_seed(seed, *purpose)).random_raw(length)
    return np.argsort(keys, kind="stable")
