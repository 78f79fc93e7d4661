"""One segment as it stands in a shard, looked up to be shown in a finding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from packsvc.shards import ShardEntry
from packsvc.storage import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSegment:
    """A segment's tokens."""

    row_group: int
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    loss_weight: NDArray[np.float32] | None


def stored_segment(store: Store, entry: ShardEntry, *, pack: int, segment: int) -> StoredSegment | None:
    """A segment by its pack's number inside the shard; None when it cannot be read."""
    try:
        with store.open(entry.path) as handle:
            file = pq.ParquetFile(handle, page_checksum_verification=True)
            group, inside = 0, pack
            while inside >= file.metadata.row_group(group).num_rows:
                inside -= file.metadata.row_group(group).num_rows
                group += 1
            names = [n for n in ("input_ids", "loss_mask", "loss_weight", "cu_seqlens") if n in file.schema_arrow.names]
            row = file.read_row_group(group, columns=names, use_threads=False).slice(inside, 1).to_pylist()[0]
    except (pa.ArrowException, OSError, ValueError, IndexError):
        return None
    span = slice(row["cu_seqlens"][segment], row["cu_seqlens"][segment + 1])
    weight = row.get("loss_weight")
    return StoredSegment(
        row_group=group,
        input_ids=np.array(row["input_ids"][span], dtype=np.int32),
        loss_mask=np.array(row["loss_mask"][span], dtype=np.bool_),
        loss_weight=None if weight is None else np.array(weight[span], dtype=np.float32),
    )
