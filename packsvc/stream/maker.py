"""Makes the batches of one rank: counts of the global batches, this rank's rows, one flattened row for each step.

Several steps are read and checked together: half of what a small batch costs is Python's and numpy's price per call.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from packsvc.shards import COUNT_COLUMNS, PackPages
from packsvc.stream.balance import balance
from packsvc.stream.batch import PackedBatch, PackIndex
from packsvc.stream.collate import RowShape, collate, lay
from packsvc.stream.epoch import Picks
from packsvc.stream.geometry import check_packs
from packsvc.stream.opening import Output
from packsvc.stream.options import Unit
from packsvc.stream.rows import Rows
from packsvc.stream.source import PackSource

if TYPE_CHECKING:
    from packsvc._native import PackContent

_TARGETS, _SQUARES = COUNT_COLUMNS.index("num_loss_tokens"), COUNT_COLUMNS.index("sum_squared_lengths")
_COLUMN_OF = {Unit.TOKENS: COUNT_COLUMNS.index("num_tokens"), Unit.LOSS_TOKENS: _TARGETS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A batch, and what its global batch adds to the achieved shares."""

    step: int
    batch: PackedBatch
    units: tuple[int, ...]
    """For each output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Batches of steps that follow each other."""

    made: list[Made]
    error: Exception | None = None
    """Why the step after these could not be made."""


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

    def make(self, picks: Picks) -> Run:
        """This rank's batches of some steps, read together."""
        try:
            return Run(made=self._make(picks))
        except Exception as error:
            if len(picks.steps) == 1:
                return Run(made=[], error=error)
        # One of them cannot be made; those before it can, and are handed out before it is told.
        made: list[Made] = []
        for one in picks.each():
            run = self.make(one)
            made += run.made
            if run.error is not None:
                return Run(made=made, error=run.error)
        return Run(made=made)

    def _make(self, picks: Picks) -> list[Made]:
        num_steps, size = picks.packs.shape
        outputs, packs = picks.outputs.ravel(), picks.packs.ravel()
        counts = self._counts(outputs, packs)
        everyone, real = counts, None
        if picks.repeated is not None:
            real = ~picks.repeated.ravel()
            everyone = counts * real[:, np.newaxis]
        targets = everyone[:, _TARGETS].reshape(num_steps, size).sum(axis=1).tolist()
        units = self._units(everyone, outputs, real, num_steps)
        share = size // self._world_size
        num_repeated = [0] * num_steps
        if self._world_size > 1 or real is not None:
            mine = self._mine(counts, real, num_steps)
            outputs, packs, counts = outputs[mine], packs[mine], counts[mine]
            if real is not None:
                num_repeated = np.count_nonzero(~real[mine].reshape(num_steps, share), axis=1).tolist()
        contents = self._contents(outputs, packs, counts)
        names = self._names(outputs, packs)
        made = []
        for i, step in enumerate(picks.steps):
            some = slice(i * share, (i + 1) * share)
            facts: dict[str, Any] = {
                "shape": self._shape,
                "pack_indices": names[some],
                "num_repeated_packs": num_repeated[i],
                "num_loss_tokens_global": targets[i],
            }
            batch = None if contents is None else lay(contents[some], counts[some], **facts)
            if batch is None:
                batch = collate(self._rows(outputs[some], packs[some], counts[some]), **facts)
            made.append(Made(step=step, batch=batch, units=units[i]))
        return made

    def close(self) -> None:
        """Let go of all files."""
        with self._lock:
            sources, self._sources = self._sources, [None] * len(self._outputs)
        for source in sources:
            if source is not None:
                source.close()

    def _counts(self, outputs: NDArray[np.int64], packs: NDArray[np.int64]) -> NDArray[np.int64]:
        """(packs, 4) what the small columns say."""
        if len(self._outputs) == 1:
            return self._source(0).counts(packs)
        counts = np.empty((len(packs), len(COUNT_COLUMNS)), dtype=np.int64)
        for output, chosen in _by_output(outputs):
            counts[chosen] = self._source(output).counts(packs[chosen])
        return counts

    def _mine(self, counts: NDArray[np.int64], real: NDArray[np.bool_] | None, num_steps: int) -> NDArray[np.int64]:
        """Which packs of some global batches this rank takes, step by step."""
        size = len(counts) // num_steps
        share = size // self._world_size
        firsts = np.arange(num_steps, dtype=np.int64)[:, np.newaxis] * size
        if self._balanced:
            costs = counts[:, _SQUARES].reshape(num_steps, size)
            mine = firsts + np.stack([balance(some, num_ranks=self._world_size)[self._rank] for some in costs])
        else:
            mine = firsts + np.arange(self._rank * share, (self._rank + 1) * share, dtype=np.int64)
        if real is not None:
            # Repeated packs stand last in the row, whatever balancing made of their places.
            mine = np.take_along_axis(mine, np.argsort(~real[mine], axis=1, kind="stable"), axis=1)
        places: NDArray[np.int64] = mine.ravel()
        return places

    def _contents(
        self, outputs: NDArray[np.int64], packs: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> list[PackContent] | None:
        """The packs for `lay`; None where only `_rows` can read them."""
        if len(self._outputs) == 1:
            return self._source(0).contents(packs, counts)
        found: dict[int, PackContent] = {}
        for output, chosen in _by_output(outputs):
            part = self._source(output).contents(packs[chosen], counts[chosen])
            if part is None:
                return None
            found.update(zip(chosen.tolist(), part, strict=True))
        return [found[place] for place in range(len(packs))]

    def _rows(self, outputs: NDArray[np.int64], packs: NDArray[np.int64], counts: NDArray[np.int64]) -> Rows:
        """The slow twin; says what is wrong with a pack."""
        found: dict[int, PackPages] = {}
        for output, chosen in _by_output(outputs):
            found.update(zip(chosen.tolist(), self._source(output).pages(packs[chosen]), strict=True))
        pages = [found[place] for place in range(len(packs))]
        return check_packs(pages, counts, lambda i: self._source(int(outputs[i])).place(int(packs[i])))

    def _units(
        self, everyone: NDArray[np.int64], outputs: NDArray[np.int64], real: NDArray[np.bool_] | None, num_steps: int
    ) -> list[tuple[int, ...]]:
        """For each step what each output adds."""
        if self._unit is not Unit.PACKS:
            amounts = everyone[:, _COLUMN_OF[self._unit]]
        else:
            amounts = np.ones(len(everyone), dtype=np.int64) if real is None else real.astype(np.int64)
        amounts = amounts.reshape(num_steps, -1)
        of_step = outputs.reshape(num_steps, -1)
        sums = [(amounts * (of_step == output)).sum(axis=1).tolist() for output in range(len(self._outputs))]
        return list(zip(*sums, strict=True))

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
    for output in sorted(set(outputs.tolist())):
        yield output, np.flatnonzero(outputs == output)


def in_order(runs: Iterable[Run]) -> Iterator[Made]:
    """The batches of runs; an error is raised where its batch would have come."""
    for run in runs:
        yield from run.made
        if run.error is not None:
            raise run.error
