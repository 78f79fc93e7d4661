"""Makes the batch of one rank at one step: counts of the global batch, this rank's rows, one flattened row."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from packsvc.stream.balance import balance
from packsvc.stream.batch import PackedBatch, PackIndex
from packsvc.stream.collate import RowShape, collate
from packsvc.stream.epoch import Picks
from packsvc.stream.opening import Output
from packsvc.stream.options import Unit
from packsvc.stream.source import PackRow, PackSource


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
        counts = {"num_tokens": 0, "num_loss_tokens": 0, "sum_squared_lengths": 0}
        values = {name: np.zeros(len(picks.packs), dtype=np.int64) for name in counts}
        for output, chosen in self._of_outputs(picks.outputs):
            found = self._source(output).counts(picks.packs[chosen])
            for name, column in values.items():
                column[chosen] = getattr(found, name)
        counted = ~picks.repeated
        mine = self._mine(values["sum_squared_lengths"])
        # Repeated packs stand last in the row, whatever balancing made of their places.
        mine = mine[np.argsort(picks.repeated[mine], kind="stable")]
        batch = collate(
            self._rows(picks.outputs[mine], picks.packs[mine]),
            shape=self._shape,
            pack_indices=self._names(picks.outputs[mine], picks.packs[mine]),
            num_repeated_packs=int(picks.repeated[mine].sum()),
            num_loss_tokens_global=int(values["num_loss_tokens"][counted].sum()),
        )
        amounts = counted.astype(np.int64) if self._unit is Unit.PACKS else values[f"num_{self._unit}"] * counted
        units = np.bincount(picks.outputs, weights=amounts, minlength=len(self._outputs))
        return Made(step=step, batch=batch, units=tuple(int(n) for n in units))

    def close(self) -> None:
        """Let go of all files."""
        with self._lock:
            sources, self._sources = self._sources, [None] * len(self._outputs)
        for source in sources:
            if source is not None:
                source.close()

    def _mine(self, costs: NDArray[np.int64]) -> NDArray[np.int64]:
        if self._balanced:
            dealt: NDArray[np.int64] = balance(costs, num_ranks=self._world_size)[self._rank]
            return dealt
        share = len(costs) // self._world_size
        return np.arange(self._rank * share, (self._rank + 1) * share, dtype=np.int64)

    def _rows(self, outputs: NDArray[np.int64], packs: NDArray[np.int64]) -> list[PackRow]:
        rows: list[PackRow | None] = [None] * len(packs)
        for output, places in self._of_outputs(outputs):
            for place, row in zip(places.tolist(), self._source(output).rows(packs[places]), strict=True):
                rows[place] = row
        return [row for row in rows if row is not None]

    def _of_outputs(self, outputs: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Each output that is among these, and where."""
        if len(self._outputs) == 1:
            yield 0, np.arange(len(outputs))
            return
        for output in np.unique(outputs):
            yield int(output), np.flatnonzero(outputs == output)

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
