"""Boundaries, positions, lengths, padding and ids of packs; all of it on whole row groups at once.

A pack whose boundaries do not hold is reported and taken out, since everything else is told from them. The cheap
form of each check looks at all tokens in one or two passes; only when it finds something is the place looked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from packsvc.validation.report import Failure, Findings
from packsvc.validation.shard_file import Chunk, ShardFacts, offsets_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the segments of a chunk lie in its flat tokens; Z with tails, S without."""

    starts: NDArray[np.int64]
    """(Z,) flat start of every segment, tails included."""
    lengths: NDArray[np.int64]
    """(Z,)"""
    pack: NDArray[np.int64]
    """(Z,) the pack that each stands in."""
    number: NDArray[np.int64]
    """(Z,) number inside the pack."""
    real: NDArray[np.bool_]
    """(Z,) False for tails."""

    def at(self, flat: int) -> int:
        """The segment that the flat token belongs to."""
        return int(np.searchsorted(self.starts, flat, side="right")) - 1


def check_boundaries(chunk: Chunk, facts: ShardFacts, findings: Findings) -> Chunk:
    """`cu_seqlens` and the number of segments; gives the packs whose boundaries can be trusted."""
    packs = chunk.packs
    findings.saw("geometry", packs.num_packs, "packs")
    size = np.diff(packs.cu_offsets)
    segments = np.diff(packs.segment_offsets)
    good = np.ones(packs.num_packs, dtype=np.bool_)

    def drop(bad: NDArray[np.bool_], message: str) -> None:
        findings.each("geometry", bad & good, lambda i: chunk.failure("geometry", message, i))
        good[bad] = False

    drop(size < 2, "cu_seqlens has fewer than two boundaries")
    drop(segments < 1, "the pack has no segment")
    padded = np.append(packs.cu_seqlens, np.int32(-1))
    first, last = padded[packs.cu_offsets[:-1]], padded[np.maximum(packs.cu_offsets[1:] - 1, 0)]
    drop(first != 0, "cu_seqlens does not start at 0")
    drop(last != facts.seq_len, f"cu_seqlens does not end at seq_len ({facts.seq_len})")
    inner = np.ones(max(0, len(packs.cu_seqlens) - 1), dtype=np.bool_)
    edges = packs.cu_offsets[1:-1] - 1
    inner[edges[(edges >= 0) & (edges < len(inner))]] = False
    falls = np.flatnonzero((packs.cu_seqlens[1:] <= packs.cu_seqlens[:-1]) & inner)
    fallen = np.searchsorted(packs.cu_offsets, falls, side="right") - 1
    number = {int(p): int(f - packs.cu_offsets[p]) for p, f in zip(fallen[::-1], falls[::-1], strict=True)}
    bad = np.zeros_like(good)
    bad[fallen] = True
    findings.each(
        "geometry",
        bad & good,
        lambda i: chunk.failure("geometry", "cu_seqlens is not strictly increasing", i, number[i]),
    )
    good[bad] = False
    extra = size - 1 - segments
    findings.each(
        "geometry",
        ((extra < 0) | (extra > 1)) & good,
        lambda i: chunk.failure(
            "geometry", f"{size[i] - 1} spans in cu_seqlens, {segments[i]} segments have an origin", i
        ),
    )
    good[(extra < 0) | (extra > 1)] = False
    return chunk.select(good)


def lay_out(chunk: Chunk, facts: ShardFacts) -> Layout:
    """The segments of packs whose boundaries hold."""
    packs = chunk.packs
    spans = np.diff(packs.cu_offsets) - 1
    span_offsets = offsets_of(spans)
    pack = np.repeat(np.arange(packs.num_packs), spans)
    number = np.arange(span_offsets[-1]) - span_offsets[pack]
    at = packs.cu_offsets[pack] + number
    begin = packs.cu_seqlens[at].astype(np.int64)
    end = packs.cu_seqlens[at + 1].astype(np.int64)
    return Layout(
        starts=begin + pack * facts.seq_len,
        lengths=end - begin,
        pack=pack,
        number=number,
        real=number < np.diff(packs.segment_offsets)[pack],
    )


def check_geometry(chunk: Chunk, layout: Layout, facts: ShardFacts, findings: Findings) -> None:
    """Counts about lengths, alignment, positions, padding and ids."""
    check_lengths(chunk, layout, facts, findings)
    check_positions(chunk, layout, findings)
    check_ids(chunk, layout, facts, findings)


def check_lengths(chunk: Chunk, layout: Layout, facts: ShardFacts, findings: Findings) -> None:
    """`num_segments`, `num_tokens`, `sum_squared_lengths`; room for alignment; at most `max_segments`."""
    packs, real = chunk.packs, layout.real
    lengths, pack = layout.lengths[real], layout.pack[real]
    segments = np.diff(packs.segment_offsets)
    first = packs.segment_offsets[:-1]
    check_count("geometry", chunk, "num_segments", segments, findings)
    check_count("geometry", chunk, "num_tokens", np.add.reduceat(lengths, first), findings)
    check_count("geometry", chunk, "sum_squared_lengths", np.add.reduceat(lengths * lengths, first), findings)
    if facts.align > 1:
        reserved = np.bincount(pack, -(-lengths // facts.align) * facts.align, minlength=packs.num_packs)
        findings.each(
            "geometry",
            reserved > facts.seq_len,
            lambda i: chunk.failure(
                "geometry",
                f"segments padded to multiples of {facts.align} take {int(reserved[i])} tokens, "
                f"seq_len is {facts.seq_len}",
                i,
            ),
        )
    if facts.max_segments is not None:
        findings.each(
            "geometry",
            segments > facts.max_segments,
            lambda i: chunk.failure(
                "geometry", f"{segments[i]} segments, packing.max_segments is {facts.max_segments}", i
            ),
        )


def check_count(check: str, chunk: Chunk, name: str, found: NDArray[np.int64], findings: Findings) -> None:
    """A column of counts against what the pack holds."""
    stated = getattr(chunk.packs, name)
    findings.each(check, stated != found, lambda i: chunk.failure(check, f"{name} is {stated[i]}, found {found[i]}", i))


def check_positions(chunk: Chunk, layout: Layout, findings: Findings) -> None:
    """`position_ids` against those told from `cu_seqlens`: 0 at every start, one more at every other token."""
    positions = chunk.packs.position_ids.reshape(-1)
    breaks = np.flatnonzero(positions[1:] - positions[:-1] != 1) + 1
    starts = layout.starts
    if np.array_equal(breaks, starts[1:]) and not positions[starts].any():
        return
    wanted = np.arange(len(positions)) - np.repeat(starts, layout.lengths)
    fail_tokens(
        "geometry",
        chunk,
        layout,
        positions != wanted,
        lambda flat: f"position_ids is {positions[flat]}, cu_seqlens makes it {wanted[flat]}",
        findings,
    )


def check_ids(chunk: Chunk, layout: Layout, facts: ShardFacts, findings: Findings) -> None:
    """Ids inside the vocabulary, and nothing but the pad id on tails."""
    ids = chunk.packs.input_ids.reshape(-1)
    if ids.min() < 0 or ids.max() >= facts.vocab_size:
        fail_tokens(
            "geometry",
            chunk,
            layout,
            (ids < 0) | (ids >= facts.vocab_size),
            lambda flat: f"id {ids[flat]} is outside the vocabulary of {facts.vocab_size}",
            findings,
        )
    tails = tail_tokens(layout)
    if (ids[tails] != facts.pad_id).any():
        wrong = np.zeros(len(ids), dtype=np.bool_)
        wrong[tails] = ids[tails] != facts.pad_id
        fail_tokens(
            "geometry",
            chunk,
            layout,
            wrong,
            lambda flat: f"id {ids[flat]} in the tail, the pad id is {facts.pad_id}",
            findings,
        )


def tail_tokens(layout: Layout) -> NDArray[np.int64]:
    """Flat places of all padding."""
    starts, lengths = layout.starts[~layout.real], layout.lengths[~layout.real]
    offsets = offsets_of(lengths)
    return np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1])


def fail_tokens(
    check: str,
    chunk: Chunk,
    layout: Layout,
    wrong: NDArray[np.bool_],
    say: Callable[[int], str],
    findings: Findings,
) -> None:
    """One failure for each pack with a wrong token, at its first one.

    Args:
        wrong: (P * seq_len,) bool, flat.
        say: Words for a flat place.
    """
    seq_len = chunk.packs.input_ids.shape[1]
    places = np.flatnonzero(wrong)
    packs, at = np.unique(places // seq_len, return_index=True)
    first = dict(zip(packs.tolist(), places[at].tolist(), strict=True))
    bad = np.zeros(chunk.packs.num_packs, dtype=np.bool_)
    bad[packs] = True

    def describe(pack: int) -> Failure:
        flat = first[pack]
        segment = int(layout.number[layout.at(flat)])
        return chunk.failure(check, f"token {flat - pack * seq_len}: {say(flat)}", pack, segment)

    findings.each(check, bad, describe)
