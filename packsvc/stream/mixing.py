"""Which output gives the next pack, when several are mixed.

Pack j of output i is due at time (j + 1/2) / w_i, where w_i is the output's part of the packs; packs are taken by
due time, ties by output. This is a low-discrepancy order: after any number of packs each output has given its part
to within a pack or so. It is a pure function of the position, found by two bisections in closed form, so that a
resume costs the same anywhere. Due times are compared as float64 by one expression everywhere; that they are
rounded does no harm, since rounding keeps them rising.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class Mixture:
    """An interleaving of several outputs; an epoch ends with the last pack of the first one used up."""

    def __init__(self, parts: Sequence[float], sizes: Sequence[int]) -> None:
        """Prepare the interleaving.

        Args:
            parts: For each output, its part of all packs; positive, any scale.
            sizes: For each output, how many packs it has; none 0.
        """
        total = sum(parts)
        self._parts = np.array([part / total for part in parts], dtype=np.float64)
        self._lengths = [self._rank(output, size - 1) + 1 for output, size in enumerate(sizes)]

    def __len__(self) -> int:
        return min(self._lengths)

    def picks(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Who gives the packs at positions [start, stop).

        Returns:
            Two (stop - start,) int64 arrays: the output, and which of its packs (0 is its first in the epoch).
        """
        margin = len(self._parts) + 1
        low = self._counts_before(float(max(0, start - margin)))
        high = self._counts_before(float(stop + margin))
        outputs = np.repeat(np.arange(len(low)), high - low)
        numbers = np.concatenate([np.arange(a, b, dtype=np.int64) for a, b in zip(low, high, strict=True)])
        due = self._due(outputs, numbers)
        order = np.lexsort((outputs, due))[start - int(low.sum()) :][: stop - start]
        return outputs[order], numbers[order]

    def _due(self, output: NDArray[np.int64], number: NDArray[np.int64]) -> NDArray[np.float64]:
        return (number + 0.5) / self._parts[output]

    def _counts_before(self, time: float) -> NDArray[np.int64]:
        """How many packs of each output are due before `time`."""
        outputs = np.arange(len(self._parts))
        counts = np.floor(time * self._parts + 0.5).astype(np.int64)
        # The product is rounded, so it may be one off; the due times decide.
        counts -= (counts > 0) & (self._due(outputs, counts - 1) >= time)
        counts += self._due(outputs, counts) < time
        return counts

    def _rank(self, output: int, number: int) -> int:
        """Position at which pack `number` of `output` stands."""
        due = float((number + 0.5) / self._parts[output])
        counts = self._counts_before(due)
        outputs = np.arange(len(self._parts))
        tied = (self._due(outputs, counts) == due) & (outputs < output)
        return int(counts.sum() + tied.sum())
