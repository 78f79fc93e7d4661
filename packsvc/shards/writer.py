"""Packs to the bytes of a whole Parquet file.

The file is made in memory and handed over whole: whoever publishes it does so in one step. One chunk of packs
is one row group, so that memory holds the compressed file and one chunk of arrays. The same packs give the same
bytes with the same pyarrow, on any machine and day; threads are off where they could matter.
"""

from __future__ import annotations

import io
from collections.abc import Iterable

import pyarrow.parquet as pq

from packsvc.shards.columns import to_table
from packsvc.shards.layout import ShardMeta, packs_per_row_group, schema, writer_options
from packsvc.types import PackColumns


def write_shard(chunks: Iterable[PackColumns], *, meta: ShardMeta, compression: str, loss_weights: bool) -> bytes:
    """A whole shard, one row group for each chunk.

    Args:
        chunks: Packs in order; each chunk has at most `packs_per_row_group(seq_len)` of them.
        meta: Goes into the file metadata.
        compression: "zstd:LEVEL", "lz4", "snappy" or "none".
        loss_weights: Whether the shard has the column `loss_weight`; the chunks must agree.

    Raises:
        ValueError: A chunk does not fit `meta` or `loss_weights`, or is too large for a row group.
    """
    sink = io.BytesIO()  # grows in place and hands its bytes over as they are
    file_schema = schema(meta.seq_len, loss_weights).with_metadata(meta.to_metadata())
    options = writer_options(seq_len=meta.seq_len, compression=compression, loss_weights=loss_weights)
    with pq.ParquetWriter(sink, file_schema, **options) as writer:
        for packs in chunks:
            if packs.num_packs == 0:
                continue
            _check(packs, meta, loss_weights)
            table = to_table(packs, loss_weights=loss_weights).replace_schema_metadata(file_schema.metadata)
            writer.write_table(table, row_group_size=packs.num_packs)
    return sink.getvalue()


def _check(packs: PackColumns, meta: ShardMeta, loss_weights: bool) -> None:
    if packs.input_ids.shape[1] != meta.seq_len:
        raise ValueError(f"{meta.shard}: packs have {packs.input_ids.shape[1]} tokens, seq_len is {meta.seq_len}")
    if packs.num_packs > packs_per_row_group(meta.seq_len):
        raise ValueError(
            f"{meta.shard}: a chunk of {packs.num_packs} packs; a row group holds {packs_per_row_group(meta.seq_len)}"
        )
    if (packs.loss_weight is not None) != loss_weights:
        raise ValueError(f"{meta.shard}: loss_weights is {loss_weights}, but the packs say otherwise")
