"""Makes the batch of one rank at one step: counts of the global batch, this rank's rows, one flattened row."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from packsvc.shards import COUNT_COLUMNS
from packsvc.stream.balance import balance
from packsvc.stream.batch import PackedBatch, PackIndex
from packsvc.stream.collate import RowShape, collate
from packsvc.stream.epoch import Picks
from packsvc.stream.opening import Output
from packsvc.stream.options import Unit
from packsvc.stream.rows import Rows, arranged
from packsvc.stream.source import PackSource

_TARGETS, _SQUARES = COUNT_COLUMNS.index("num_loss_tokens"), COUNT_COLUMNS.index("sum_squared_lengths")
_COLUMN_OF = {Unit.TOKENS: COUNT_COLUMNS.index("num_tokens"), Unit.LOSS_TOKENS: _TARGETS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A batch, and what its global batch adds to the achieved shares."""

    step: int
    batch: PackedBatch
    units: tuple[int, ...]
    """For each output."""


class BatchMaker:
    """Opened outputs of this process. `make` may be called by several threads at once."""

    def __init__(
        self,
        outputs: Sequence[Output],
        *,
        rank: int,
        world_size: int,
        balanced: bool,
        shape: RowShape,
        unit: Unit,
    ) -> None:
        self._outputs = outputs
        self._rank = rank
        self._world_size = world_size
        self._balanced = balanced
        self._shape = shape
        self._unit = unit
        self._sources: list[PackSource | None] = [None] * len(outputs)
        self._lock = threading.Lock()

    def touch_all(self) -> None:
        """Check every shard of the split against the manifest now. Raises DamageError naming the first bad one."""
        for output, opened in enumerate(self._outputs):
            for shard in opened.shards:
                self._source(output).touch(int(shard))

    def make(self, step: int, picks: Picks) -> Made:
        """This rank's batch of a step."""
        counts = self._counts(picks)
        mine = self._mine(counts[:, _SQUARES])
        num_repeated, counted = 0, counts
        if picks.num_repeated:
            # Repeated packs stand last in the row, whatever balancing made of their places, and add no targets.
            mine = np.arange(len(counts))[mine]
            mine = mine[np.argsort(picks.repeated[mine], kind="stable")]
            num_repeated, counted = int(picks.repeated[mine].sum()), counts * ~picks.repeated[:, np.newaxis]
        packs, outputs = picks.packs[mine], picks.outputs[mine]
        batch = collate(
            self._rows(outputs, packs, counts[mine]),
            shape=self._shape,
            pack_indices=self._names(outputs, packs),
            num_repeated_packs=num_repeated,
            num_loss_tokens_global=int(counted[:, _TARGETS].sum()),
        )
        amounts = ~picks.repeated if self._unit is Unit.PACKS else counted[:, _COLUMN_OF[self._unit]]
        return Made(step=step, batch=batch, units=self._sums(amounts, picks.outputs))

    def close(self) -> None:
        """Let go of all files."""
        with self._lock:
            sources, self._sources = self._sources, [None] * len(self._outputs)
        for source in sources:
            if source is not None:
                source.close()

    def _counts(self, picks: Picks) -> NDArray[np.int64]:
        """(G, 4) what the small columns say of the global batch."""
        if len(self._outputs) == 1:
            return self._source(0).counts(picks.packs)
        counts = np.empty((len(picks.packs), len(COUNT_COLUMNS)), dtype=np.int64)
        for output, chosen in _by_output(picks.outputs):
            counts[chosen] = self._source(output).counts(picks.packs[chosen])
        return counts

    def _mine(self, costs: NDArray[np.int64]) -> NDArray[np.int64] | slice:
        if self._balanced:
            dealt: NDArray[np.int64] = balance(costs, num_ranks=self._world_size)[self._rank]
            return dealt
        share = len(costs) // self._world_size
        return slice(self._rank * share, (self._rank + 1) * share)

    def _rows(self, outputs: NDArray[np.int64], packs: NDArray[np.int64], counts: NDArray[np.int64]) -> Rows:
        if len(self._outputs) == 1:
            return self._source(0).rows(packs, counts)
        parts, places = [], []
        for output, chosen in _by_output(outputs):
            parts.append(self._source(output).rows(packs[chosen], counts[chosen]))
            places.append(chosen.tolist())
        return arranged(parts, places)

    def _sums(self, amounts: NDArray[np.int64] | NDArray[np.bool_], outputs: NDArray[np.int64]) -> tuple[int, ...]:
        """What each output adds."""
        if len(self._outputs) == 1:
            return (int(amounts.sum()),)
        sums = np.bincount(outputs, weights=amounts, minlength=len(self._outputs))
        return tuple(int(n) for n in sums)

    def _names(self, outputs: NDArray[np.int64], packs: NDArray[np.int64]) -> list[PackIndex]:
        if self._outputs[0].share is None:
            return list(packs.tolist())
        return [(int(output), int(pack)) for output, pack in zip(outputs, packs, strict=True)]

    def _source(self, output: int) -> PackSource:
        with self._lock:
            source = self._sources[output]
            if source is None:
                source = self._sources[output] = self._outputs[output].source()
            return source


def _by_output(outputs: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Each output that is among these, and where."""
    for output in np.unique(outputs):
        yield int(output), np.flatnonzero(outputs == output)
