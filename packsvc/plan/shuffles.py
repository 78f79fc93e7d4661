"""Seeded permutations that are the same for ever, on every machine and with every numpy.

Each index gets the output of SplitMix64 (Steele, Lea, Flood 2014) at its place in a counter, and the keys are
sorted. SplitMix64 is a bijection of its counter, so no two keys are equal and the order cannot depend on how the
sort breaks ties. numpy's own generators are not used: their streams may change between versions.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

_STEP = 0x9E3779B97F4A7C15


def permutation(n: int, seed: int, *stream: int | str) -> NDArray[np.int64]:
    """A permutation of 0..n-1 that depends on nothing but its arguments.

    Args:
        n: How many.
        seed: Any integer.
        stream: Names what the permutation is for, so that uses of one seed do not move together.

    Returns:
        (n,) int64.
    """
    label = "\x1f".join(f"{type(part).__name__}:{part}" for part in (seed, *stream))
    start = int.from_bytes(hashlib.sha256(label.encode()).digest()[:8], "little")
    return np.argsort(_splitmix64(start, n), kind="stable")


def _splitmix64(start: int, n: int) -> NDArray[np.uint64]:
    """(n,) outputs of SplitMix64 from the state `start` on; arithmetic wraps at 2^64."""
    keys = np.arange(1, n + 1, dtype=np.uint64)
    keys *= np.uint64(_STEP)
    keys += np.uint64(start)
    keys ^= keys >> np.uint64(30)
    keys *= np.uint64(0xBF58476D1CE4E5B9)
    keys ^= keys >> np.uint64(27)
    keys *= np.uint64(0x94D049BB133111EB)
    keys ^= keys >> np.uint64(31)
    return keys
