"""Two encodings of the same rows, compared token by token: what the audit of a running job does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packsvc.types import EncodedBatch


@dataclass(slots=True)
class _Row:
    """What a batch holds of one row."""

    segments: list[int] = field(default_factory=list)
    rejects: list[tuple[int | None, str]] = field(default_factory=list)


def first_difference(one: EncodedBatch, other: EncodedBatch, *, rows: Sequence[tuple[int, int]]) -> str | None:
    """Where two encodings of some rows, given as (file, row), first differ; None when they do not."""
    there, again = _by_row(one, rows), _by_row(other, rows)
    for file, row in rows:
        a, b = there[file, row], again[file, row]
        where = f"input {file}, row {row}"
        if a.rejects != b.rejects:
            return f"{where}: rejected as {a.rejects} and as {b.rejects}"
        if len(a.segments) != len(b.segments):
            return f"{where}: {len(a.segments)} segments and {len(b.segments)}"
        for x, y in zip(a.segments, b.segments, strict=True):
            if found := _segment_difference(one, x, other, y):
                return f"{where}, part {one.part[x]}: {found}"
    return None


def _by_row(batch: EncodedBatch, rows: Sequence[tuple[int, int]]) -> dict[tuple[int, int], _Row]:
    found = {key: _Row() for key in rows}
    for i, key in enumerate(zip(batch.file.tolist(), batch.row.tolist(), strict=True)):
        if key in found:
            found[key].segments.append(i)
    for reject in batch.rejects:
        if (reject.file, reject.row) in found:
            found[reject.file, reject.row].rejects.append((reject.part, reject.reason.value))
    return found


def _segment_difference(one: EncodedBatch, x: int, other: EncodedBatch, y: int) -> str | None:
    if (one.part[x], one.split[x]) != (other.part[y], other.split[y]):
        return f"part and split are {(one.part[x], one.split[x])} and {(other.part[y], other.split[y])}"
    a = slice(int(one.offsets[x]), int(one.offsets[x + 1]))
    b = slice(int(other.offsets[y]), int(other.offsets[y + 1]))
    pairs: list[tuple[str, NDArray[Any], NDArray[Any]]] = [
        ("id", one.input_ids[a], other.input_ids[b]),
        ("loss mask", one.loss_mask[a], other.loss_mask[b]),
    ]
    if one.loss_weight is not None and other.loss_weight is not None:
        pairs.append(("loss weight", one.loss_weight[a], other.loss_weight[b]))
    for what, left, right in pairs:
        shared = min(len(left), len(right))
        differ = np.flatnonzero(left[:shared] != right[:shared])
        if len(differ):
            at = int(differ[0])
            return f"token {at} has {what} {left[at]} and {right[at]}"
        if len(left) != len(right):
            return f"{len(left)} tokens and {len(right)}"
    return None
