"""The pure function of a group: read its pieces, encode, pack, write shards and one commit record.

Idempotent: what it writes depends on the plan and the group number alone, so it can be run twice, on another
machine, or killed at any moment. Shards are content-named and appear whole; the commit record is put if
absent, and one that exists must hold the same bytes. What grows with the group is its ids, masks and weights, once
(5 to 9 bytes a token), and the compressed bytes of the shard in the making (1 to 2 a token) and of the rejects; a
batch of rows, a row group and what libraries hold come on top.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packsvc.assemble import assemble
from packsvc.config import Format, Limits, PackJob, Source, Strategy
from packsvc.encode import BatchMerger, Encoder, collect_new, collector_paused, open_encoder
from packsvc.errors import ConflictError, LimitError
from packsvc.plan import place
from packsvc.run.group_counts import length_rows, loss_counts, shard_facts, source_records
from packsvc.run.planfile import Plan, canonical_json
from packsvc.run.shardpacks import read_packs
from packsvc.run.tails import read_tails, select_tails, write_tails
from packsvc.shards import (
    RejectWriter,
    ShardMeta,
    packs_per_row_group,
    packs_per_shard,
    shard_file_name,
    write_shard,
)
from packsvc.sources import Reading, copies, passes, read_example, read_piece
from packsvc.storage import Store
from packsvc.types import Counts, EncodedBatch, Example, Piece, Placement, Reason, Reject

BATCH_ROWS = 1024
BATCH_BYTES = 8_000_000
"""A batch ends at the row that fills it: its text and what is made of it are held at once."""


def commit_name(group: int) -> str:
    return f"commits/{group:06d}.json"


@dataclass(slots=True)
class _Rows:
    """What the pieces of a group became."""

    batches: BatchMerger = field(default_factory=BatchMerger)
    copies: list[NDArray[np.int64]] = field(default_factory=list)
    """For each batch (S,) int64: how often each segment is packed."""
    rejects: RejectWriter = field(default_factory=RejectWriter)
    counts: dict[str, Counts] = field(default_factory=dict)


@dataclass(slots=True)
class _Batch:
    """Rows of one source that are encoded together."""

    examples: list[Example] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    """Rows that are no examples."""
    often: dict[tuple[int, int], int] = field(default_factory=dict)
    """By (file, row) how often it is packed; empty where everything is packed once."""
    held: int = 0

    @property
    def is_full(self) -> bool:
        return len(self.examples) + len(self.rejects) >= BATCH_ROWS or self.held >= BATCH_BYTES

    @property
    def is_empty(self) -> bool:
        return not self.examples and not self.rejects

    def add(self, row: Example | Reject, *, usual: int) -> None:
        if isinstance(row, Reject):
            self.rejects.append(row)
            self.held += len(row.record)
            return
        self.examples.append(row)
        text = None if row.raw is None else row.raw.raw
        self.held += usual if text is None else len(text)

    def clear(self) -> None:
        self.examples.clear()
        self.rejects.clear()
        self.often.clear()
        self.held = 0


def pack_group(plan: Plan, group: int, store: Store, *, limits: Limits) -> dict[str, Any]:
    """Make group `group` of the plan and commit it.

    Args:
        limits: When to give up; those of the run, which may be wider than the plan's.

    Returns:
        The commit record, as `commits/<group>.json` holds it.

    Raises:
        LimitError: This group alone has more rejects than the whole job may have.
        ConflictError: A commit of other content exists.
    """
    job = plan.job
    encoder = open_encoder(job, plan.encoder)
    with collector_paused():
        rows = _read(plan, job, group, store, encoder)
    reject_entry = _write_rejects(rows.rejects, group, store)
    _check_group_limits(plan, job, rows.counts, group, limits)
    repeats = np.concatenate(rows.copies) if rows.copies else np.zeros(0, np.int64)
    batch = rows.batches.finish()
    order = np.repeat(np.arange(batch.num_segments, dtype=np.int64), repeats)
    record: dict[str, Any] = {
        "format": 1,
        "plan_id": plan.plan_id,
        "group": group,
        "kind": "rows",
        "rejects": reject_entry,
        "sources": source_records(plan, batch, repeats, rows.counts),
        "lengths": length_rows(plan, job, batch, order),
        "audited": encoder.audited,
    }
    send = len(plan.groups) > 1 and job.packing.strategy is not Strategy.NEXT_FIT
    record["shards"], tails = _write_packs(
        plan, job, group, batch, order, store, pad_id=encoder.facts.pad_id, send=send
    )
    record["tails"] = write_tails(batch, tails, group=group, store=store) if len(tails) else None
    return commit(record, store)


def repack_group(plan: Plan, group: int, store: Store) -> dict[str, Any]:
    """Make a group out of packs of another output; like `pack_group` otherwise. What is counted stays counted there."""
    job = plan.job
    batch = read_packs(plan, plan.groups[group], storage_options=store.storage_options)
    order = np.arange(batch.num_segments, dtype=np.int64)
    names = sorted({plan.inputs[int(f)].source for f in np.unique(batch.file)})
    counts = {name: Counts() for name in names}
    record: dict[str, Any] = {
        "format": 1,
        "plan_id": plan.plan_id,
        "group": group,
        "kind": "repacked",
        "rejects": None,
        "sources": source_records(plan, batch, np.ones(batch.num_segments, np.int64), counts),
        "lengths": length_rows(plan, job, batch, order),
        "audited": 0,
    }
    send = len(plan.groups) > 1 and job.packing.strategy is not Strategy.NEXT_FIT
    pad_id = plan.encoder["facts"]["pad_id"]
    record["shards"], tails = _write_packs(plan, job, group, batch, order, store, pad_id=pad_id, send=send)
    record["tails"] = write_tails(batch, tails, group=group, store=store) if len(tails) else None
    return commit(record, store)


def pack_tail_group(plan: Plan, group: int, senders: Sequence[int], store: Store) -> dict[str, Any]:
    """Make a group out of what the groups `senders` sent to the last round; like `pack_group` otherwise."""
    job = plan.job
    batch = read_tails(store, senders)
    order = np.arange(batch.num_segments, dtype=np.int64)
    shards, _ = _write_packs(plan, job, group, batch, order, store, pad_id=plan.encoder["facts"]["pad_id"], send=False)
    record = {
        "format": 1,
        "plan_id": plan.plan_id,
        "group": group,
        "kind": "tails",
        "senders": list(senders),
        "rejects": None,
        "sources": {},
        "lengths": [],
        "audited": 0,
        "shards": shards,
        "tails": None,
    }
    return commit(record, store)


def commit(record: dict[str, Any], store: Store) -> dict[str, Any]:
    """Put the commit record if absent; one that is there must be the same.

    Raises:
        ConflictError: A commit of other content exists: the job is not deterministic.
    """
    name, data = commit_name(record["group"]), canonical_json(record) + b"\n"
    if not store.put_if_absent(name, data) and store.read(name) != data:
        raise ConflictError(
            f"{store.describe(name)}: a commit of group {record['group']} with other content exists: the same plan "
            f"gave two results. Nothing was overwritten; keep both and report it, or pack into a new output."
        )
    return record


def _read(plan: Plan, job: PackJob, group: int, store: Store, encoder: Encoder) -> _Rows:
    sources = {s.name: s for s in job.sources}
    readings = {
        name: Reading(format=Format(tree["format"]), columns=tree["columns"], why=tree["why"])
        for name, tree in plan.readings.items()
    }
    out = _Rows()
    waiting = _Batch()

    def encode(name: str) -> None:
        batch = encoder.encode(waiting.examples, source=name)
        repeats = _repeats(batch, waiting.often)
        # Rows come in the order of inputs and rows, so rejects that are sorted here are sorted in all.
        out.rejects.add(sorted(waiting.rejects + batch.rejects, key=_place))
        waiting.clear()
        collect_new()
        counts = out.counts[name]
        counts.add(batch.counts)
        counts.repeated_tokens += int(((repeats - 1) * np.diff(batch.offsets)).sum())
        out.batches.add(batch)
        out.copies.append(repeats)

    for name, pieces in groupby(plan.groups[group], key=lambda piece: plan.inputs[piece.file].source):
        counts = out.counts.setdefault(name, Counts())
        for piece in pieces:
            usual = piece.size_bytes // max(1, piece.num_rows or 1)
            for example in _examples(plan, job, piece, sources[name], readings[name], store, counts, waiting.often):
                waiting.add(example, usual=usual)
                if waiting.is_full:
                    encode(name)
        if not waiting.is_empty:
            encode(name)
    return out


def _place(reject: Reject) -> tuple[int, int, int]:
    return reject.file, reject.row, -1 if reject.part is None else reject.part


def _examples(
    plan: Plan,
    job: PackJob,
    piece: Piece,
    source: Source,
    reading: Reading,
    store: Store,
    counts: Counts,
    often: dict[tuple[int, int], int],
) -> Iterator[Example | Reject]:
    """A piece's examples and rejects; counts all but the examples, and notes how often each is packed if not once."""
    file = plan.inputs[piece.file]
    for row in read_piece(piece, file, store=store, storage_options=store.storage_options):
        if source.where and row.error is None and not passes(row, source.where):
            counts.rows += 1
            counts.filtered += 1
            continue
        if source.weight != 1:
            times = copies(source.weight, seed=job.seed, source=source.name, path=file.path, row=row.row)
            if times == 0:
                counts.rows += 1
                counts.left_out += 1
                continue
            often[row.file, row.row] = times
        example = read_example(row, reading, source_name=source.name)
        if isinstance(example, Reject):
            counts.rows += 1
            counts.rejected += 1
            counts.rejected_by_reason[example.reason] = counts.rejected_by_reason.get(example.reason, 0) + 1
        yield example


def _repeats(batch: EncodedBatch, often: Mapping[tuple[int, int], int]) -> NDArray[np.int64]:
    if not often:
        return np.ones(batch.num_segments, np.int64)
    rows = zip(batch.file.tolist(), batch.row.tolist(), strict=True)
    return np.fromiter(map(often.__getitem__, rows), np.int64, batch.num_segments)


def _write_rejects(rejects: RejectWriter, group: int, store: Store) -> dict[str, Any] | None:
    data, name = rejects.finish(), f"rejects/{group:06d}.parquet"
    if not rejects.num_rows:
        return None
    store.publish(name, data)
    return {
        "path": name,
        "size_bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "num_rows": rejects.num_rows,
    }


def _check_group_limits(plan: Plan, job: PackJob, counts: Mapping[str, Counts], group: int, limits: Limits) -> None:
    total = Counts()
    for c in counts.values():
        total.add(c)
    check_limits(limits, total, seq_len=job.seq_len, num_rows=plan.num_rows, where=f"group {group}")


def check_limits(limits: Limits, counts: Counts, *, seq_len: int, num_rows: int, where: str) -> None:
    """Stop as soon as a limit of the job cannot be met any more.

    Raises:
        LimitError: The rejects so far are more than the whole job may have.
    """
    overlong = counts.rejected_by_reason.get(Reason.OVERLONG, 0)
    rejected = counts.rejected - overlong
    reasons = ", ".join(
        f"{reason} {n}" for reason, n in sorted(counts.rejected_by_reason.items(), key=lambda e: (-e[1], e[0]))
    )
    if rejected > limits.max_reject_fraction * num_rows:
        raise LimitError(
            f"{where}: {rejected} rows rejected ({reasons}) of {num_rows} in the job, more than "
            f"limits.max_reject_fraction {limits.max_reject_fraction:g} allows. Look at OUT/rejects, mend the data "
            f"or raise the limit."
        )
    long = overlong + counts.truncated + counts.split
    if long > limits.max_overlong_fraction * num_rows:
        raise LimitError(
            f"{where}: {long} rows over seq_len {seq_len} (rejected or cut) of {num_rows} in the job, more than "
            f"limits.max_overlong_fraction {limits.max_overlong_fraction:g} allows. Raise seq_len, choose another "
            f"`overlong`, or raise the limit."
        )


def _write_packs(
    plan: Plan,
    job: PackJob,
    group: int,
    batch: EncodedBatch,
    order: NDArray[np.int64],
    store: Store,
    *,
    pad_id: int,
    send: bool,
) -> tuple[list[dict[str, Any]], NDArray[np.int64]]:
    """Pack and write the segments named by `order`; returns shard entries and the segments sent to the last round."""
    shards: list[dict[str, Any]] = []
    sent: list[NDArray[np.int64]] = []
    lengths, loss = np.diff(batch.offsets), loss_counts(batch)
    for index, split in enumerate(job.split_names):
        mine = order[batch.split[order] == index]
        if not len(mine):
            continue
        placement = place(
            lengths[mine],
            job.seq_len,
            strategy=job.packing.strategy.value,
            max_segments=job.packing.max_segments,
            align=job.packing.align,
            seed=derived_seed(job.seed, "place", split, group),
        )
        placement = Placement(order=mine[placement.order], pack_offsets=placement.pack_offsets)
        if send:
            placement, tails = select_tails(
                placement, lengths, capacity=job.seq_len, align=job.packing.align, num_segments=len(order)
            )
            sent.append(tails)
        shards += _write_shards(plan, job, group, split, batch, placement, store, pad_id=pad_id, loss=loss)
    return shards, np.concatenate(sent) if sent else np.zeros(0, np.int64)


def _write_shards(
    plan: Plan,
    job: PackJob,
    group: int,
    split: str,
    batch: EncodedBatch,
    placement: Placement,
    store: Store,
    *,
    pad_id: int,
    loss: NDArray[np.int64],
) -> list[dict[str, Any]]:
    per_shard, per_row_group = packs_per_shard(job.shard_size, job.seq_len), packs_per_row_group(job.seq_len)
    out: list[dict[str, Any]] = []
    for k, start in enumerate(range(0, placement.num_packs, per_shard)):
        stop = min(start + per_shard, placement.num_packs)
        chunks = (
            assemble(batch, placement, start=at, stop=min(at + per_row_group, stop), seq_len=job.seq_len, pad_id=pad_id)
            for at in range(start, stop, per_row_group)
        )
        shard = f"{split}-{group:06d}-{k:03d}"
        meta = ShardMeta(plan_id=plan.plan_id, seq_len=job.seq_len, shard=shard)
        data = write_shard(chunks, meta=meta, compression=job.compression, loss_weights=job.loss_weights)
        digest = hashlib.sha256(data).hexdigest()
        name = shard_file_name(shard, digest)
        store.publish(name, data)
        out.append(
            {
                "path": name,
                "split": split,
                "size_bytes": len(data),
                "sha256": digest,
                **shard_facts(np.diff(batch.offsets), loss, placement, start, stop),
            }
        )
    return out


def derived_seed(seed: int, *names: str | int) -> int:
    """A seed for one purpose, from the job's seed: 63 bits of a sha256."""
    text = "/".join(str(n) for n in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
