"""Seeded draws by hash: which split a row falls into, and which rows are audited.

A draw depends on the seed and on what is drawn for, never on order, file layout of equal rows, or machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping


def uniform(*keys: object, data: bytes = b"") -> float:
    """A number in [0, 1) from SHA-256 of the keys' texts, each ended by a zero byte, and then `data`."""
    digest = hashlib.sha256()
    for key in keys:
        digest.update(f"{key}\0".encode())
    digest.update(data)
    return int.from_bytes(digest.digest()[:8], "big") / 2.0**64


def draw_split(shares: Mapping[str, float], *, seed: int, data: bytes) -> int:
    """Which of the sorted split names a row falls into, by the canonical bytes of what it says."""
    names = sorted(shares)
    drawn, reached, last = uniform(seed, "split", data=data), 0.0, 0
    for index, name in enumerate(names):
        if shares[name] > 0:
            reached, last = reached + shares[name], index
            if drawn < reached:
                return index
    return last


def is_audited(fraction: float, *, seed: int, source: str, file: int, row: int) -> bool:
    """Whether a row belongs to the seeded sample that is encoded a second time."""
    if fraction <= 0 or fraction >= 1:
        return fraction > 0
    return uniform(seed, "audit", source, file, row) < fraction
