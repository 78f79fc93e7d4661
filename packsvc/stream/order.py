"""The order of packs in an epoch: a pure function of (seed, epoch, index).

Shards are permuted, then packs are permuted inside windows of neighbouring shards: a reader keeps a window's
shards at hand and no more, and a pack may still stand anywhere in it. Inside a window the permutation is a
Feistel network over a x b >= n with cycle walking (Black and Rogaway, "Ciphers with arbitrary finite domains",
2002): no table, any index alone, so that resuming is as cheap at the end of an epoch as at its start. Memory is
some integers a shard.

There is no shuffle buffer: a buffer's content is lost at a resume, and with it the promise of exactly once.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

WINDOW_SHARDS = 8
WINDOW_PACKS = 1 << 16
_ROUNDS = 8


class PackOrder:
    """All packs of some shards, each once, in the order of one epoch."""

    def __init__(
        self,
        first_packs: Sequence[int] | NDArray[np.int64],
        sizes: Sequence[int] | NDArray[np.int64],
        *,
        seed: int,
        epoch: int,
        shuffle: bool,
        stream: int = 0,
        window_shards: int = WINDOW_SHARDS,
        window_packs: int = WINDOW_PACKS,
    ) -> None:
        """Prepare the order of one epoch.

        Args:
            first_packs: (shards,) number of each shard's first pack, as the manifest counts.
            sizes: (shards,) packs in each shard, none 0.
            seed: Of the whole run.
            epoch: From 0.
            shuffle: False: the order of the manifest, whatever seed and epoch are.
            stream: Tells outputs apart that are mixed, so that their orders are independent.
            window_shards: A window has at least so many shards
            window_packs: and at least so many packs; a rest too small for one belongs to the last.
        """
        first = np.asarray(first_packs, dtype=np.int64)
        counts = np.asarray(sizes, dtype=np.int64)
        self._seed = ("packs", seed, epoch, stream)
        shards = _shard_order(len(counts), ("shards", seed, epoch, stream)) if shuffle else np.arange(len(counts))
        self._first = first[shards]
        self._starts = _starts(counts[shards])
        self._windows = _windows(self._starts, window_shards, window_packs) if shuffle else None

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def windows(self) -> NDArray[np.int64]:
        """(windows + 1,) first index of each window; without a shuffle the whole order is one."""
        return self._windows if self._windows is not None else self._starts[[0, -1]]

    def packs(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Pack numbers at some places of the order.

        Args:
            indices: (n,) int64 in [0, len), in any order.

        Returns:
            (n,) int64 pack numbers as the manifest counts them.
        """
        places = indices
        if self._windows is not None:
            places = np.empty_like(indices)
            window_of = np.searchsorted(self._windows, indices, side="right") - 1
            for window in sorted(set(window_of.tolist())):  # np.unique would load numpy.ma, which takes 10 ms
                start, stop = int(self._windows[window]), int(self._windows[window + 1])
                chosen = window_of == window
                keys = _round_keys((*self._seed, window))
                places[chosen] = permute(indices[chosen] - start, stop - start, keys) + start
        shard = np.searchsorted(self._starts, places, side="right") - 1
        return self._first[shard] + places - self._starts[shard]


def permute(index: NDArray[np.int64], size: int, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """A keyed permutation of [0, size), evaluated at `index` alone.

    A place is split into (left, right) of an a x b grid that just holds `size`; rounds add a hash of one half to
    the other, modulo its side, which can be undone and so is one to one on the grid. What falls outside [0, size)
    is sent through again until it falls inside: less than one place in sqrt(size) does.
    """
    side = math.isqrt(size - 1) + 1
    other = -(-size // side)
    values = index.astype(np.uint64)
    walking = np.arange(len(values))
    while len(walking):
        left, right = np.divmod(values[walking], np.uint64(other))
        for number, key in enumerate(keys):
            if number % 2 == 0:
                left = (left + mix(right ^ key) % np.uint64(side)) % np.uint64(side)
            else:
                right = (right + mix(left ^ key) % np.uint64(other)) % np.uint64(other)
        moved = left * np.uint64(other) + right
        values[walking] = moved
        walking = walking[moved >= size]
    return values.astype(np.int64)


def mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """64 bits to 64 well-mixed bits, one to one (the finalizer of SplitMix64)."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _round_keys(name: tuple[object, ...]) -> NDArray[np.uint64]:
    """One 64-bit key a round, from anything that prints the same everywhere."""
    digest = hashlib.shake_256(repr(name).encode()).digest(8 * _ROUNDS)
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _shard_order(count: int, name: tuple[object, ...]) -> NDArray[np.int64]:
    """Shards sorted by a keyed hash of their number: a table, but of shards, not of packs."""
    keys = mix(np.arange(count, dtype=np.uint64) ^ _round_keys(name)[0])
    return np.argsort(keys, kind="stable").astype(np.int64)


def _starts(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    starts = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=starts[1:])
    return starts


def _windows(starts: NDArray[np.int64], shards: int, packs: int) -> NDArray[np.int64]:
    """First index of each window, and the end; windows are runs of whole shards."""
    count = len(starts) - 1
    firsts = [0]
    while True:
        first = firsts[-1]
        after = max(first + shards, int(np.searchsorted(starts, starts[first] + packs)))
        if after >= count:
            break
        firsts.append(after)
    short = after > count or starts[count] - starts[first] < packs
    if short and len(firsts) > 1:
        firsts.pop()
    return np.append(starts[firsts], starts[-1])
