"""How well an output is packed and what became of every row, from its manifest and its table of lengths.

No shard is read: the figures of a data set of any size cost one small file and one row per distinct length.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from packsvc.errors import DamageError
from packsvc.shards import Manifest
from packsvc.storage import Store
from packsvc.types import JsonDict

PERCENTILES = {"shortest": 0, "p10": 10, "p25": 25, "median": 50, "p75": 75, "p90": 90, "p99": 99, "longest": 100}


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """What `packing.align` costs."""

    align: int
    reserved_tokens: int
    """Room that is kept free so that the reader can pad every segment."""
    efficiency_cost: float
    """These tokens as a share of all places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Figures of a packed output."""

    output: str
    name: str
    seq_len: int
    totals: JsonDict
    """Keys as in the manifest."""
    splits: dict[str, JsonDict]
    sources: dict[str, JsonDict]
    lengths: dict[str, int]
    """Percentiles of the tokens of segments, by name; empty where the output has no table of lengths."""
    mean_length: float
    alignment: Alignment | None
    """None when nothing is reserved."""

    @property
    def loss_share(self) -> float:
        """Trained tokens among the real ones."""
        return ratio(self.totals["loss_tokens"], self.totals["tokens"])

    def to_json(self) -> JsonDict:
        """Plain JSON values; `totals`, `sources` and `splits` as in the manifest."""
        aligned = self.alignment
        return {
            "totals": self.totals,
            "sources": self.sources,
            "splits": self.splits,
            "lengths": self.lengths,
            "mean_length": self.mean_length,
            "loss_share": self.loss_share,
            "alignment": None
            if aligned is None
            else {
                "align": aligned.align,
                "reserved_tokens": aligned.reserved_tokens,
                "efficiency_cost": aligned.efficiency_cost,
            },
        }


def stats(out: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> Stats:
    """The figures of a packed output.

    Args:
        out: Folder or URL that a job wrote.
        storage_options: For fsspec.

    Raises:
        FormatError: No manifest, an unfinished or a foreign output.
        DamageError: The table of lengths that the manifest names is gone or unreadable.
    """
    store = Store(os.fspath(out), storage_options=storage_options)
    manifest = Manifest.load(store)
    length, examples = read_lengths(store, manifest)
    return Stats(
        output=store.url,
        name=manifest.name,
        seq_len=manifest.seq_len,
        totals=manifest.totals,
        splits=manifest.splits,
        sources=manifest.sources,
        lengths=percentiles(length, examples),
        mean_length=ratio(manifest.totals["tokens"], manifest.totals["segments"]),
        alignment=alignment(length, examples, manifest) if manifest.align > 1 else None,
    )


def read_lengths(store: Store, manifest: Manifest) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(n,) lengths and (n,) how many segments have them, over all splits and sources; unsorted."""
    entry = manifest.tables.get("lengths")
    if entry is None:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    try:
        file = pq.ParquetFile(pa.BufferReader(store.read(entry.path)), page_checksum_verification=True)
        table = file.read(columns=["length", "examples"], use_threads=False)
    except FileNotFoundError:
        raise DamageError(f"{store.describe(entry.path)}: is gone, but the manifest names it") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DamageError(f"{store.describe(entry.path)}: cannot be read: {' '.join(str(error).split())}") from error
    return table["length"].to_numpy().astype(np.int64), table["examples"].to_numpy().astype(np.int64)


def percentiles(length: NDArray[np.int64], examples: NDArray[np.int64]) -> dict[str, int]:
    """Percentiles of a histogram: the smallest length that so many hundredths of the segments do not exceed.

    Lengths 10, 20, 30 of 1, 1 and 2 segments have the median 20.
    """
    if not examples.sum():
        return {}
    order = np.argsort(length, kind="stable")
    ordered, below = length[order], np.cumsum(examples[order])
    total = int(below[-1])
    ranks = {name: max(1, -(-total * share // 100)) for name, share in PERCENTILES.items()}
    return {name: int(ordered[np.searchsorted(below, rank)]) for name, rank in ranks.items()}


def alignment(length: NDArray[np.int64], examples: NDArray[np.int64], manifest: Manifest) -> Alignment:
    """What the room reserved for alignment takes."""
    align = manifest.align
    reserved = int(((-length % align) * examples).sum())
    places = manifest.totals["packs"] * manifest.seq_len
    return Alignment(align=align, reserved_tokens=reserved, efficiency_cost=ratio(reserved, places))


def ratio(part: float, whole: float) -> float:
    """A share; 0 of nothing is 0."""
    return part / whole if whole else 0.0
