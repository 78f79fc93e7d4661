"""Batches to one batch, without ever holding their tokens twice.

Each column is one buffer that grows as batches come: the system moves its pages when it grows, so that a group of
a gigabyte takes a gigabyte, and no small array stands between others that are let go of.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packsvc.types import Counts, EncodedBatch, Reject

_COLUMNS: dict[str, Any] = {
    "input_ids": np.int32,
    "loss_mask": np.bool_,
    "loss_weight": np.float32,
    "offsets": np.int64,
    "file": np.int32,
    "row": np.int64,
    "part": np.int32,
    "split": np.int16,
}


class BatchMerger:
    """Takes batches one after the other; all tokens have a weight or none has. Rejects are left to the caller."""

    def __init__(self) -> None:
        self._columns = {name: bytearray() for name in _COLUMNS}
        self._columns["offsets"] += bytes(8)
        self._tokens = 0
        self._has_weights = False
        self._counts = Counts()

    def add(self, batch: EncodedBatch) -> None:
        """A batch behind those that are in."""
        for name, dtype in _COLUMNS.items():
            values: NDArray[Any] | None = getattr(batch, name)
            if name == "offsets":
                values = batch.offsets[1:] + self._tokens
            if values is not None:
                self._columns[name] += np.ascontiguousarray(values, dtype).data
        self._has_weights |= batch.loss_weight is not None
        self._tokens += len(batch.input_ids)
        self._counts.add(batch.counts)

    def finish(self, *, rejects: Sequence[Reject] = ()) -> EncodedBatch:
        """All of them as one; nothing can be added after that."""
        columns: dict[str, Any] = {name: np.frombuffer(self._columns[name], dtype) for name, dtype in _COLUMNS.items()}
        if not self._has_weights:
            columns["loss_weight"] = None
        return EncodedBatch(**columns, rejects=list(rejects), counts=self._counts)


def merge_batches(batches: Iterable[EncodedBatch]) -> EncodedBatch:
    """One batch of all segments, in order, with counts summed; asks for a batch when the one before is in."""
    merger, rejects = BatchMerger(), list[Reject]()
    for batch in batches:
        merger.add(batch)
        rejects += batch.rejects
    return merger.finish(rejects=rejects)
