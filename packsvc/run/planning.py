"""From a job to its plan: list the inputs, count them, cut them into pieces, deal the pieces to groups.

A group is the unit of work, of commit and of loss at a crash: at most `group_examples` rows and 256 MB of
uncompressed input. Pieces are dealt so that every group holds an even share of each source: each source's
pieces are shuffled by the seed and set at even distances on [0, 1), all sources are merged by that position,
and groups are filled in this order. Pieces are an eighth of a group where the input can be cut, so that
groups come out at least seven eighths full.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packsvc.config import PackJob
from packsvc.errors import SourceError
from packsvc.plan import permutation
from packsvc.run.pieces import Groups, Pieces
from packsvc.run.planfile import Plan, identity, identity_hash, shaping_versions
from packsvc.sources import InputCount, Reading, cut_input, list_inputs, recognise, sample_files, sample_rows
from packsvc.types import InputFile, Piece, PieceKind

GROUP_BYTES = 256_000_000
PIECES_PER_GROUP = 8
SAMPLE_ROWS = 500

CountAll = Callable[[Sequence[InputFile]], list[InputCount]]


def list_all_inputs(job: PackJob, *, storage_options: Mapping[str, Any] | None = None) -> list[InputFile]:
    """The inputs of all sources, by source, then path bytes; a file in two sources counts in both."""
    return [
        file
        for source in sorted(job.sources, key=lambda s: s.name.encode())
        for file in list_inputs(source, job=job, storage_options=storage_options)
    ]


def recognise_all(
    job: PackJob, inputs: Sequence[InputFile], *, storage_options: Mapping[str, Any] | None = None
) -> dict[str, Reading]:
    """How each source's rows are read, from the first rows of files spread over it."""
    out: dict[str, Reading] = {}
    for source in job.sources:
        files = [f for f in inputs if f.source == source.name]
        out[source.name] = recognise(sample_files(files, limit=SAMPLE_ROWS, storage_options=storage_options), source)
    return out


def piece_rows(group_examples: int) -> int:
    """Rows of a piece at most, where the input can be cut."""
    return max(1, group_examples // PIECES_PER_GROUP)


def evenly(items: Sequence[Any], n: int) -> list[Any]:
    """At most `n` of the items, evenly spaced, the first among them."""
    return [items[i * len(items) // min(n, len(items))] for i in range(min(n, len(items)))] if items else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """An input that was counted, and its pieces."""

    file: InputFile
    pieces: Pieces


def cut_counted(
    index: int,
    file: InputFile,
    count: InputCount,
    *,
    group_examples: int,
    storage_options: Mapping[str, Any] | None = None,
) -> Cut:
    """Pieces of an eighth of a group; an input that cannot be cut stays whole as long as it fits a group.

    Reads nothing, unless rows are so long that the input has to be counted more finely.
    """
    small = count.kind is PieceKind.RECUT and count.num_rows <= group_examples and count.size_bytes <= GROUP_BYTES
    pieces = cut_input(
        index,
        file,
        count,
        max_rows=group_examples if small else piece_rows(group_examples),
        max_bytes=GROUP_BYTES if small else GROUP_BYTES // PIECES_PER_GROUP,
        storage_options=storage_options,
    )
    lines = count.marks[-1].row if count.marks else None
    counted = replace(file, num_rows=count.num_rows, num_lines=lines, content_hash=count.content_hash)
    return Cut(file=counted, pieces=Pieces.of(pieces))


def make_plan(
    *, job: PackJob, cuts: Sequence[Cut], readings: Mapping[str, Reading], encoder: Mapping[str, Any]
) -> Plan:
    """The plan of a whole run.

    Args:
        cuts: Of each input, in their order.
    """
    files = [cut.file for cut in cuts]
    groups = deal(
        Pieces.together([cut.pieces for cut in cuts]),
        sources=[f.source for f in files],
        max_rows=job.packing.group_examples,
        max_bytes=GROUP_BYTES,
        seed=job.seed,
    )
    return _plan(job, files, groups, readings, encoder, limit=None)


def make_trial_plan(
    *,
    job: PackJob,
    inputs: Sequence[InputFile],
    readings: Mapping[str, Reading],
    encoder: Mapping[str, Any],
    limit: int,
    storage_options: Mapping[str, Any] | None = None,
) -> Plan:
    """The plan of a trial run: at most `limit` rows of each source, spread over its files. Counts nothing."""
    pieces: list[Piece] = []
    for name in sorted({f.source for f in inputs}):
        files = [i for i, f in enumerate(inputs) if f.source == name]
        for index, rows in _spread(inputs, files, limit=limit, storage_options=storage_options).items():
            for start in range(0, len(rows), job.packing.group_examples):
                take = rows[start : start + job.packing.group_examples]
                pieces.append(
                    Piece(
                        file=index,
                        kind=PieceKind.WHOLE,
                        first_row=take[0],
                        num_rows=len(take),
                        size_bytes=min(inputs[index].size_bytes, GROUP_BYTES),
                        take=tuple(take),
                    )
                )
    groups = deal(
        Pieces.of(pieces),
        sources=[f.source for f in inputs],
        max_rows=job.packing.group_examples,
        max_bytes=GROUP_BYTES,
        seed=job.seed,
    )
    return _plan(job, inputs, groups, readings, encoder, limit=limit)


def _plan(
    job: PackJob,
    inputs: Sequence[InputFile],
    groups: Groups,
    readings: Mapping[str, Reading],
    encoder: Mapping[str, Any],
    *,
    limit: int | None,
) -> Plan:
    parts = identity(job=job, inputs=inputs, tokenizer=encoder["facts"], limit=limit)
    return Plan(
        plan_id=identity_hash(parts),
        config=job.dump(),
        base=job.base,
        inputs=tuple(inputs),
        groups=groups,
        readings={name: asdict(reading) for name, reading in readings.items()},
        encoder=dict(encoder),
        versions=shaping_versions(),
        limit=limit,
    )


def deal(pieces: Pieces, *, sources: Sequence[str], max_rows: int, max_bytes: int, seed: int) -> Groups:
    """Spread pieces over groups, each source evenly; inside a group they stand by input and position.

    Args:
        sources: Name of the source of each input.
    """
    ranks = {name: rank for rank, name in enumerate(sorted(set(sources)))}
    of_file = np.array([ranks[name] for name in sources], np.int64)
    rank_of = of_file[pieces.table["file"]]
    placed, position, turn = [], [], []
    for rank in range(len(ranks)):
        mine = np.flatnonzero(rank_of == rank)
        placed.append(mine[permutation(len(mine), seed, 1, rank)])
        position.append((np.arange(len(mine)) + 0.5) / len(mine) if len(mine) else np.zeros(0))
        turn.append(np.arange(len(mine)))
    if not len(pieces):
        return Groups.of(())
    every = np.concatenate(placed)
    dealt = pieces.at(every[np.lexsort((np.concatenate(turn), rank_of[every], np.concatenate(position)))])
    group = _fill(dealt.rows(), dealt.table["size_bytes"], max_rows=max_rows, max_bytes=max_bytes)
    order = np.lexsort((dealt.table["start"], dealt.table["first_row"], dealt.table["file"], group))
    offsets = np.searchsorted(group, np.arange(group[-1] + 2)).astype(np.int64)
    return Groups(dealt.at(order), offsets)


def _fill(rows: NDArray[np.int64], sizes: NDArray[np.int64], *, max_rows: int, max_bytes: int) -> NDArray[np.int64]:
    """(n,) the group of each piece: pieces in order, a new group where one would be too large."""
    group = np.zeros(len(rows), np.int64)
    number = in_rows = in_bytes = 0
    for place, (more_rows, more_bytes) in enumerate(zip(rows, sizes, strict=True)):
        if place and (in_rows + more_rows > max_rows or in_bytes + more_bytes > max_bytes):
            number += 1
            in_rows = in_bytes = 0
        group[place] = number
        in_rows += more_rows
        in_bytes += more_bytes
    return group


def _spread(
    inputs: Sequence[InputFile],
    files: Sequence[int],
    *,
    limit: int,
    storage_options: Mapping[str, Any] | None,
) -> dict[int, list[int]]:
    """Row numbers to take of each file: an even share of each, what small files lack from the others."""
    rows: dict[int, list[int]] = {i: [] for i in files}
    open_files, missing = list(files), limit
    while open_files and missing > 0:
        share, extra = divmod(missing, len(open_files))
        still = []
        for position, index in enumerate(open_files):
            want = len(rows[index]) + share + (position < extra)
            if want == len(rows[index]):
                still.append(index)
                continue
            found = [r.row for r in sample_rows(inputs[index], limit=want, storage_options=storage_options)]
            missing -= len(found) - len(rows[index])
            rows[index] = found
            if len(found) == want:
                still.append(index)
        if len(still) == len(open_files):
            break
        open_files = still
    return {i: r for i, r in rows.items() if r}


def check_changed(
    planned: Sequence[InputFile], found: Sequence[InputFile], count_all: CountAll, *, trial: bool
) -> list[InputFile]:
    """The inputs as found now, with what the plan knows of them where they are unchanged.

    An input of the same size whose mtime or etag differs is judged by its content hash, unless this is a trial
    run, which counted nothing.

    Raises:
        SourceError: The content of an input changed since the plan was made.
    """
    known = {(f.source, f.path): f for f in planned}
    touched = [
        f
        for f in found
        if (old := known.get((f.source, f.path))) is not None
        and old.size_bytes == f.size_bytes
        and (old.mtime, old.etag) != (f.mtime, f.etag)
        and not trial
    ]
    for file, count in zip(touched, count_all(touched), strict=True):
        if count.content_hash != known[file.source, file.path].content_hash:
            raise SourceError(
                f"{file.path}: the input changed since the plan was made (same size, other content). "
                f"Put the old file back to resume, or pack into another output."
            )
    out = []
    for file in found:
        old = known.get((file.source, file.path))
        same = old is not None and old.size_bytes == file.size_bytes
        out.append(
            replace(file, num_rows=old.num_rows, num_lines=old.num_lines, content_hash=old.content_hash)
            if old and same
            else file
        )
    return out


def inputs_with_recut(plan: Plan, groups: Sequence[int]) -> dict[int, list[Piece]]:
    """Pieces of these groups that a compressed input has to be recut into, by input."""
    out: dict[int, list[Piece]] = {}
    for piece in plan.groups.of_kind(PieceKind.RECUT, groups):
        out.setdefault(piece.file, []).append(piece)
    return {i: sorted(p, key=lambda piece: piece.start) for i, p in sorted(out.items())}
