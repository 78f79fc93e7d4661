"""How large a row number of an input can be, told from the manifest alone.

The counting pass leaves `num_lines`, which is exact. Where nothing was counted (a trial run), formats of records are
bounded by `num_rows` and JSON lines by their bytes, compressed ones at the highest ratio the codec has. Which of the
possible rows it was is what `against_sources` proves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from packsvc.shards import InputEntry
from packsvc.validation.digests import ROW_BITS

COUNTED = ("parquet", "arrow", "ipc", "feather", "csv")
HIGHEST_RATIO = {"gz": 1032, "zst": 2**17}


def row_limits(inputs: Sequence[InputEntry]) -> NDArray[np.int64]:
    """(inputs,) one more than the largest row number that each can have."""
    return np.array([_limit(entry) for entry in inputs], dtype=np.int64)


def _limit(entry: InputEntry) -> int:
    lines = entry.extra.get("num_lines")
    if isinstance(lines, int):
        return lines
    name = entry.path.lower()
    ratio = 1
    for suffix, factor in HIGHEST_RATIO.items():
        if name.endswith("." + suffix):
            name, ratio = name[: -len(suffix) - 1], factor
    if name.rsplit(".", 1)[-1] in COUNTED and entry.num_rows is not None:
        return int(entry.num_rows)
    return int(min(entry.size_bytes * ratio, 2**ROW_BITS - 1))
