"""One epoch as a sequence of global batches: which packs each step takes, from all ranks together.

Step t takes packs [tG, (t+1)G) of the order, G packs being a global batch. Nothing here knows a rank, a thread or
a worker: they only share out what a step takes, and so cannot change it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from packsvc.stream.mixing import Mixture
from packsvc.stream.options import Remainder
from packsvc.stream.order import PackOrder

_CHUNK = 4096
"""Places computed at a time: numpy's price per call is shared by many steps."""
_FIRST_CHUNK = 64
"""Few at first, so that the first batch comes soon."""
TOKENS_AT_ONCE = 1 << 17
"""So many are read at a time, in whole steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picks:
    """The packs of some global batches, in order."""

    steps: range
    """Which (n,)."""
    outputs: NDArray[np.int64]
    """(n, G) which output; all 0 unless several are mixed."""
    packs: NDArray[np.int64]
    """(n, G) pack numbers as that output's manifest counts."""
    repeated: NDArray[np.bool_] | None
    """(n, G) True for packs that only fill up the last global batch; they get no targets. None: there are none."""

    def each(self) -> Iterator[Picks]:
        """Step by step."""
        for i in range(len(self.steps)):
            here = slice(i, i + 1)
            yield Picks(
                steps=self.steps[here],
                outputs=self.outputs[here],
                packs=self.packs[here],
                repeated=None if self.repeated is None else self.repeated[here],
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """How an epoch of some packs is cut into steps."""

    num_packs: int
    global_batch: int
    remainder: Remainder

    def __len__(self) -> int:
        if self.remainder is Remainder.PAD:
            return -(-self.num_packs // self.global_batch)
        return self.num_packs // self.global_batch

    @property
    def num_dropped(self) -> int:
        """Packs at the end of the order that no step takes."""
        return max(0, self.num_packs - len(self) * self.global_batch)

    @property
    def num_repeated(self) -> int:
        """Packs from the start of the order that fill up the last step."""
        return max(0, len(self) * self.global_batch - self.num_packs)


class Epoch:
    """The order of one epoch over one output or a mixture. Used by one thread."""

    def __init__(self, orders: Sequence[PackOrder], mixture: Mixture | None, steps: Steps) -> None:
        self._orders = orders
        self._mixture = mixture
        self._steps = steps
        self._start = 0
        self._places = _FIRST_CHUNK
        self._chunk: tuple[NDArray[np.int64], NDArray[np.int64]] = (np.zeros(0, np.int64), np.zeros(0, np.int64))

    def picks(self, steps: range) -> Picks:
        """What some steps take, at least one."""
        size, total = self._steps.global_batch, self._steps.num_packs
        bounds = [(step * size, (step + 1) * size) for step in steps]
        if steps.step == 1:
            bounds = [(bounds[0][0], bounds[-1][1])]
        missing = max(0, bounds[-1][1] - total)
        parts = [self._range(start, min(stop, total)) for start, stop in bounds]
        repeated = None
        if missing:
            repeated = (np.arange(len(steps) * size) >= len(steps) * size - missing).reshape(-1, size)
            # The order is taken from its start again, more than once where a batch is larger than an epoch.
            first = self._range(0, min(total, missing))
            parts += [first] * (missing // total) + [(first[0][: missing % total], first[1][: missing % total])]
        outputs, packs = (part[0] if len(part) == 1 else np.concatenate(part) for part in zip(*parts, strict=True))
        return Picks(steps=steps, outputs=outputs.reshape(-1, size), packs=packs.reshape(-1, size), repeated=repeated)

    def _range(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Output and pack number at places [start, stop) of the order."""
        if not self._start <= start <= stop <= self._start + len(self._chunk[0]):
            end = min(max(stop, start + self._places), self._steps.num_packs)
            self._places = _CHUNK
            self._start, self._chunk = start, self._compute(start, end)
        low, high = start - self._start, stop - self._start
        return self._chunk[0][low:high], self._chunk[1][low:high]

    def _compute(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if self._mixture is None:
            return np.zeros(stop - start, dtype=np.int64), self._orders[0].packs(np.arange(start, stop, dtype=np.int64))
        outputs, numbers = self._mixture.picks(start, stop)
        packs = np.empty_like(numbers)
        for output, order in enumerate(self._orders):
            chosen = outputs == output
            packs[chosen] = order.packs(numbers[chosen])
        return outputs, packs


def runs(steps: range, *, step_tokens: int) -> Iterator[range]:
    """Steps to be read together: one at first, so that it comes soon, then more.

    Args:
        steps: All of them.
        step_tokens: Tokens that this rank takes at a step.
    """
    most, size, start = max(1, TOKENS_AT_ONCE // step_tokens), 1, 0
    while start < len(steps):
        yield steps[start : start + size]
        start += size
        size = min(2 * size, most, 16)
