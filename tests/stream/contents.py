"""Packs as their pages hold them, for the compiled code that lays them into rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.parquet import varint


def content_of(
    ids: NDArray[np.int32],
    mask: NDArray[np.bool_],
    bounds: NDArray[np.int32],
    weights: NDArray[np.float32] | None = None,
) -> tuple[Any, ...]:
    """One pack: content, where each page begins, and where the last ends."""
    bits = np.packbits(mask, bitorder="little").tobytes()
    pages = [
        levels(len(ids)) + ids.astype("<i4").tobytes(),
        levels(len(mask)) + bits,
        levels(len(bounds)) + bounds.astype("<i4").tobytes(),
    ]
    if weights is not None:
        pages.append(levels(len(weights)) + weights.astype("<f4").tobytes())
    return joined(pages)


def joined(pages: list[bytes]) -> tuple[Any, ...]:
    """Pages in one buffer that begins with bytes of something else."""
    places = np.cumsum([3, *map(len, pages)]).tolist()
    return (b"???" + b"".join(pages), *places)


def levels(count: int) -> bytes:
    """Of one full list, as runs: repetition 0 and then ones, definition all ones."""
    return block(run(1, 0) + (run(count - 1, 1) if count > 1 else b"")) + block(run(count, 1))


def block(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data


def run(length: int, value: int) -> bytes:
    """So many equal levels."""
    return varint(length << 1) + bytes([value])


def groups(values: list[int]) -> bytes:
    """Levels as groups of eight bits, the last filled up with zeros."""
    bits = np.packbits(np.array(values, dtype=np.uint8), bitorder="little").tobytes()
    return varint(len(bits) << 1 | 1) + bits
