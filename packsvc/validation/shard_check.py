"""One shard, whole: every check that needs nothing but the shard, and what the others need of it.

A pure function of the shard's bytes, so that shards can be checked in any order, in threads or on other machines.
What it gives back is small: 16 bytes a segment of origin, counts by source, lengths, counts of packs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packsvc.shards import ShardEntry, shard_of_path
from packsvc.storage import Store
from packsvc.validation.digests import SegmentDigests, Wanted, digests_of
from packsvc.validation.geometry import Layout, check_boundaries, check_geometry, lay_out
from packsvc.validation.masks import check_mask, check_weights
from packsvc.validation.report import Failure, Findings
from packsvc.validation.shard_file import Chunk, ShardFacts, chunks, open_shard

PACK_FIELDS = ("num_segments", "num_tokens", "num_loss_tokens", "sum_squared_lengths")


@dataclass(slots=True, kw_only=True)
class ShardResult:
    """What a shard holds, as found; packs that could not be read are not in it."""

    findings: Findings
    file: NDArray[np.int32]
    """(S,)"""
    row: NDArray[np.int64]
    """(S,)"""
    part: NDArray[np.int32]
    """(S,)"""
    per_source: NDArray[np.int64]
    """(sources, 5) segments, tokens, loss tokens, sum of squared lengths, longest."""
    lengths: NDArray[np.int64]
    """(n, 3) source, length, segments of it; sorted."""
    pack_number: NDArray[np.int64]
    """(P,) over all shards."""
    pack_counts: NDArray[np.int64]
    """(P, 4) of `PACK_FIELDS`, as found."""
    digests: SegmentDigests | None = None
    """Of the segments that are compared with the sources."""


@dataclass(slots=True)
class _Gathered:
    """Lists that grow chunk by chunk."""

    file: list[NDArray[np.int32]] = field(default_factory=list)
    row: list[NDArray[np.int64]] = field(default_factory=list)
    part: list[NDArray[np.int32]] = field(default_factory=list)
    number: list[NDArray[np.int64]] = field(default_factory=list)
    counts: list[NDArray[np.int64]] = field(default_factory=list)
    keys: list[NDArray[np.int64]] = field(default_factory=list)
    digests: list[SegmentDigests] = field(default_factory=list)


def check_shard(
    store: Store,
    entry: ShardEntry,
    *,
    index: int,
    first_pack: int,
    facts: ShardFacts,
    wanted: Wanted | None = None,
) -> ShardResult:
    """Check one shard.

    Args:
        index: Number of the shard in the manifest.
        first_pack: Number of its first pack over all shards.
        wanted: Which segments to digest for the comparison with the sources; None: none.
    """
    findings = Findings()
    gathered = _Gathered()
    per_source = np.zeros((facts.num_sources, 5), dtype=np.int64)
    check_split(entry, findings)
    file = open_shard(store, entry, facts, findings)
    if file is not None:
        if file.metadata.num_rows != entry.num_packs:
            findings.equal("counts", "num_packs", file.metadata.num_rows, entry.num_packs, shard=entry.path)
        for chunk in chunks(file, entry, facts, first_pack, findings):
            sound = check_boundaries(chunk, facts, findings)
            if sound.packs.num_packs:
                layout = lay_out(sound, facts)
                known = check_chunk(sound, layout, facts, findings, gathered, per_source)
                if wanted is not None:
                    gathered.digests.append(digests_of(sound, layout, wanted, known=known, shard=index))
    result = ShardResult(
        findings=findings,
        file=_joined(gathered.file, np.int32),
        row=_joined(gathered.row, np.int64),
        part=_joined(gathered.part, np.int32),
        per_source=per_source,
        lengths=length_counts(_joined(gathered.keys, np.int64), facts.seq_len),
        pack_number=_joined(gathered.number, np.int64),
        pack_counts=np.concatenate(gathered.counts) if gathered.counts else np.zeros((0, 4), dtype=np.int64),
        digests=SegmentDigests.join(gathered.digests) if wanted is not None else None,
    )
    if file is not None:
        check_entry(entry, result, facts)
    return result


def check_chunk(
    chunk: Chunk,
    layout: Layout,
    facts: ShardFacts,
    findings: Findings,
    gathered: _Gathered,
    per_source: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """All checks of packs whose boundaries hold; adds what they hold to `gathered` and `per_source`.

    Returns:
        (S,) bool, segments whose origin exists.
    """
    packs = chunk.packs
    check_geometry(chunk, layout, facts, findings)
    targets = check_mask(chunk, layout, findings)[layout.real]
    check_weights(chunk, layout, findings)
    known = check_origin(chunk, layout, facts, findings)
    lengths = layout.lengths[layout.real]
    source = facts.source_of_input[np.where(known, packs.segment_file, 0)]
    for column, value in enumerate((np.ones_like(lengths), lengths, targets, lengths * lengths)):
        np.add.at(per_source[:, column], source[known], value[known])
    np.maximum.at(per_source[:, 4], source[known], lengths[known])
    gathered.file.append(packs.segment_file[known])
    gathered.row.append(packs.segment_row[known])
    gathered.part.append(packs.segment_part[known])
    gathered.keys.append(np.where(known, source, facts.num_sources) * (facts.seq_len + 1) + lengths)
    gathered.number.append(chunk.numbers)
    first = packs.segment_offsets[:-1]
    found = (
        np.diff(packs.segment_offsets),
        np.add.reduceat(lengths, first),
        np.add.reduceat(targets, first),
        np.add.reduceat(lengths * lengths, first),
    )
    gathered.counts.append(np.stack(found, axis=1))
    return known


def check_origin(chunk: Chunk, layout: Layout, facts: ShardFacts, findings: Findings) -> NDArray[np.bool_]:
    """Origins that exist: (S,) True where file, row and part are possible."""
    packs = chunk.packs
    file, row, part = packs.segment_file, packs.segment_row, packs.segment_part
    findings.saw("provenance", len(file), "segments")
    pack, number = layout.pack[layout.real], layout.number[layout.real]
    inputs = len(facts.row_limits)
    known = (file >= 0) & (file < inputs)
    limit = facts.row_limits[np.where(known, file, 0)]

    def describe(i: int) -> Failure:
        message = f"origin (file {file[i]}, row {row[i]}, part {part[i]}) cannot be: "
        if not 0 <= file[i] < inputs:
            message += f"there are {inputs} inputs"
        elif row[i] < 0 or part[i] < 0:
            message += "rows and parts count from 0"
        else:
            message += f"that input has no more than {limit[i]} rows"
        return chunk.failure("provenance", message, int(pack[i]), int(number[i]))

    known &= (row >= 0) & (row < limit) & (part >= 0)
    findings.each("provenance", ~known, describe)
    return known


def check_split(entry: ShardEntry, findings: Findings) -> None:
    """A shard's name carries the split that the manifest gives it."""
    shard = shard_of_path(entry.path)
    if shard is None:
        findings.fail("splits", "the path is not shards/<split>-<group>-<k>-<sha12>.parquet", shard=entry.path)
    elif shard.rsplit("-", 2)[0] != entry.split:
        findings.fail("splits", f"the manifest puts this shard into split {entry.split!r}", shard=entry.path)


def check_entry(entry: ShardEntry, result: ShardResult, facts: ShardFacts) -> None:
    """The manifest's line of a shard against what the shard holds."""
    counts, findings = result.pack_counts, result.findings
    findings.saw("counts", 1, "shards")
    if len(counts) != entry.num_packs:
        return  # some packs could not be read and are findings already; sums over the rest would only repeat that
    found: dict[str, Any] = dict(zip(PACK_FIELDS, counts.sum(axis=0).tolist(), strict=True))
    findings.equal("counts", "num_segments", found["num_segments"], entry.num_segments, shard=entry.path)
    findings.equal("counts", "num_tokens", found["num_tokens"], entry.num_tokens, shard=entry.path)
    findings.equal("counts", "num_loss_tokens", found["num_loss_tokens"], entry.num_loss_tokens, shard=entry.path)
    longest = int(result.per_source[:, 4].max(initial=0))
    more = {
        "sum_squared_lengths": found["sum_squared_lengths"],
        "max_segments": int(counts[:, 0].max(initial=0)),
        "min_pack_tokens": int(counts[:, 1].min(initial=facts.seq_len)),
        "max_segment_tokens": longest,
    }
    for name, value in more.items():
        if name in entry.extra:
            findings.equal("counts", name, value, entry.extra[name], shard=entry.path)


def length_counts(keys: NDArray[np.int64], seq_len: int) -> NDArray[np.int64]:
    """(n, 3) source, length, segments from keys source * (seq_len + 1) + length."""
    found, number = np.unique(keys, return_counts=True)
    return np.stack((found // (seq_len + 1), found % (seq_len + 1), number), axis=1).astype(np.int64)


def _joined(parts: list[Any], dtype: Any) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)
