"""What is trained, spelled out: for each segment its tokens and the pairs (input token, label) by position.

`stored` reads it from the packs a test wrote, `streamed` from our own reader; each format is read back by the rules
of its own project into the same shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from packsvc.stream import PackStream
from tests.stream.outputs import Written

Pair = tuple[int, int, int]
"""Position of the input token in its segment, the input token, the label."""


@dataclass(frozen=True)
class Trained:
    """One segment."""

    ids: tuple[int, ...]
    pairs: tuple[Pair, ...]


def from_labels(ids: list[int], labels: list[int]) -> Trained:
    """A segment whose labels stand at their own token."""
    assert len(ids) == len(labels)
    return Trained(tuple(ids), tuple((j - 1, ids[j - 1], labels[j]) for j in range(1, len(ids)) if labels[j] != -100))


def stored(written: Written) -> list[list[Trained]]:
    """Segments of each pack, in manifest order, token by token."""
    packs = []
    for pack in written.packs:
        ids, mask = pack.input_ids[0].tolist(), pack.loss_mask[0].tolist()
        bounds = pack.cu_seqlens[: int(pack.num_segments[0]) + 1].tolist()
        packs.append(
            [
                from_labels(ids[a:b], [i if on else -100 for i, on in zip(ids[a:b], mask[a:b], strict=True)])
                for a, b in pairwise(bounds)
            ]
        )
    return packs


def streamed(out: Any, split: str = "train") -> list[list[Trained]]:
    """The same by our reader."""
    packs = []
    with PackStream(out, shuffle=False, split=split, rank=0, world_size=1) as stream:
        for batch in stream:
            ids, labels = batch.input_ids.tolist(), batch.labels.tolist()
            packs.append([from_labels(ids[a:b], labels[a:b]) for a, b in pairwise(batch.cu_seqlens.tolist())])
    return packs


def rows_of(folder: Path, pattern: str = "*.parquet") -> list[dict[str, list[int]]]:
    """All rows of the Parquet files of a folder, by file name."""
    return [row for path in sorted(folder.glob(pattern)) for row in pq.read_table(path).to_pylist()]
