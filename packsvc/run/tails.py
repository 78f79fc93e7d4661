"""The last round: examples of under-filled packs travel through storage and are packed once more.

Packing group by group leaves about half a pack of room in each group. A group of a job with several groups
sends the examples of its emptiest packs (more than 2 % empty, at most 5 % of its examples) to `tails/`;
after the last group they are packed together, `group_examples` at a time. A job ends with a handful of
under-filled packs.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from packsvc.encode import merge_batches
from packsvc.errors import DamageError
from packsvc.storage import Store
from packsvc.types import Counts, EncodedBatch, Placement

EMPTY_FRACTION = 0.02
SENT_FRACTION = 0.05


def tails_name(group: int) -> str:
    return f"tails/{group:06d}.parquet"


def select_tails(
    placement: Placement, lengths: NDArray[np.int64], *, capacity: int, align: int, num_segments: int
) -> tuple[Placement, NDArray[np.int64]]:
    """Take the emptiest packs out of a placement.

    Args:
        placement: P packs.
        lengths: Tokens of every segment that `placement.order` may name.
        capacity: Tokens in a pack.
        align: Room is reserved in multiples of this.
        num_segments: Segments of the group, of which at most 5 % are sent.

    Returns:
        The placement of the packs that stay, in their order, and (n,) int64 the segments sent, pack by pack.
    """
    sizes = np.diff(placement.pack_offsets)
    room = -(-lengths[placement.order] // align) * align
    used = np.add.reduceat(room, placement.pack_offsets[:-1])
    candidates = np.flatnonzero(used < (1 - EMPTY_FRACTION) * capacity)
    candidates = candidates[np.argsort(used[candidates], kind="stable")]
    within = np.cumsum(sizes[candidates]) <= SENT_FRACTION * num_segments
    sent = np.zeros(placement.num_packs, bool)
    sent[candidates[within]] = True
    goes = np.repeat(sent, sizes)
    offsets = np.concatenate([[0], np.cumsum(sizes[~sent])]).astype(np.int64)
    return Placement(order=placement.order[~goes], pack_offsets=offsets), placement.order[goes]


def write_tails(batch: EncodedBatch, segments: NDArray[np.int64], *, group: int, store: Store) -> dict[str, Any]:
    """Write the named segments to `tails/<group>.parquet`; returns its entry for the commit."""
    lengths = np.diff(batch.offsets)[segments]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    bounds: Any = pa.array(offsets)
    at = np.arange(offsets[-1]) + np.repeat(batch.offsets[:-1][segments] - offsets[:-1], lengths)
    columns: dict[str, Any] = {
        "input_ids": pa.LargeListArray.from_arrays(bounds, pa.array(batch.input_ids[at])),
        "loss_mask": pa.LargeListArray.from_arrays(bounds, pa.array(batch.loss_mask[at])),
        "file": batch.file[segments],
        "row": batch.row[segments],
        "part": batch.part[segments],
        "split": batch.split[segments],
    }
    if batch.loss_weight is not None:
        columns["loss_weight"] = pa.LargeListArray.from_arrays(bounds, pa.array(batch.loss_weight[at]))
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink, compression="zstd", write_page_checksum=True, use_dictionary=False)
    data = sink.getvalue()
    store.publish(tails_name(group), data)
    return {
        "path": tails_name(group),
        "size_bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "num_segments": len(segments),
    }


def read_tails(store: Store, groups: Sequence[int]) -> EncodedBatch:
    """The segments that the groups sent, in group order."""
    return merge_batches(_read_one(store, group) for group in groups)


def _read_one(store: Store, group: int) -> EncodedBatch:
    name = tails_name(group)
    try:
        table = pq.read_table(io.BytesIO(store.read(name)), page_checksum_verification=True)
    except (OSError, pa.ArrowInvalid) as error:
        raise DamageError(f"{store.describe(name)}: cannot be read back: {error}") from error

    def flat(column: str) -> Any:
        return table.column(column).combine_chunks()

    ids = flat("input_ids")
    weights = flat("loss_weight").values.to_numpy() if "loss_weight" in table.column_names else None
    return EncodedBatch(
        input_ids=ids.values.to_numpy(),
        loss_mask=flat("loss_mask").values.to_numpy(zero_copy_only=False),
        loss_weight=weights,
        offsets=ids.offsets.to_numpy(),
        file=table.column("file").to_numpy(),
        row=table.column("row").to_numpy(),
        part=table.column("part").to_numpy(),
        split=table.column("split").to_numpy(),
        rejects=[],
        counts=Counts(),
    )


def tail_groups(sent: Sequence[int], *, first: int, group_examples: int) -> list[tuple[int, list[int]]]:
    """Number the groups of the last round and deal the senders to them, in order.

    Args:
        sent: Segments that each group sent.
        first: Number of the first group of the last round.
        group_examples: Segments in a group at most; a sender of more is a group of its own.

    Returns:
        (group number, senders) for each.
    """
    out: list[tuple[int, list[int]]] = []
    held = 0
    for sender, segments in enumerate(sent):
        if not segments:
            continue
        if not out or held + segments > group_examples:
            out.append((first + len(out), []))
            held = 0
        out[-1][1].append(sender)
        held += segments
    return out
