"""From a job to its plan: list the inputs, count them, cut them into pieces, deal the pieces to groups.

A group is the unit of work, of commit and of loss at a crash: at most `group_examples` rows and 256 MB of
uncompressed input. Pieces are dealt so that every group holds an even share of each source: each source's
pieces are shuffled by the seed and set at even distances on [0, 1), all sources are merged by that position,
and groups are filled in this order. Pieces are an eighth of a group where the input can be cut, so that
groups come out at least seven eighths full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from packsvc.config import PackJob
from packsvc.errors import SourceError
from packsvc.plan import permutation
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


def make_plan(
    *,
    job: PackJob,
    inputs: Sequence[InputFile],
    counts: Sequence[InputCount],
    readings: Mapping[str, Reading],
    encoder: Mapping[str, Any],
    storage_options: Mapping[str, Any] | None = None,
) -> Plan:
    """The plan of a whole run; reads nothing, unless rows are so long that an input has to be counted more finely."""
    files = [
        replace(f, num_rows=c.num_rows, num_lines=c.marks[-1].row if c.marks else None, content_hash=c.content_hash)
        for f, c in zip(inputs, counts, strict=True)
    ]
    pieces = [
        piece
        for index, (file, count) in enumerate(zip(files, counts, strict=True))
        for piece in _cut(index, file, count, job.packing.group_examples, storage_options)
    ]
    groups = deal(
        pieces,
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
        pieces,
        sources=[f.source for f in inputs],
        max_rows=job.packing.group_examples,
        max_bytes=GROUP_BYTES,
        seed=job.seed,
    )
    return _plan(job, inputs, groups, readings, encoder, limit=limit)


def _plan(
    job: PackJob,
    inputs: Sequence[InputFile],
    groups: Sequence[Sequence[Piece]],
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
        groups=tuple(tuple(g) for g in groups),
        readings={name: asdict(reading) for name, reading in readings.items()},
        encoder=dict(encoder),
        versions=shaping_versions(),
        limit=limit,
    )


def _cut(
    index: int,
    file: InputFile,
    count: InputCount,
    group_examples: int,
    storage_options: Mapping[str, Any] | None,
) -> list[Piece]:
    """Pieces of an eighth of a group; an input that cannot be cut stays whole as long as it fits a group."""
    if count.kind is PieceKind.RECUT and count.num_rows <= group_examples and count.size_bytes <= GROUP_BYTES:
        return cut_input(index, file, count, max_rows=group_examples, max_bytes=GROUP_BYTES)
    return cut_input(
        index,
        file,
        count,
        max_rows=piece_rows(group_examples),
        max_bytes=GROUP_BYTES // PIECES_PER_GROUP,
        storage_options=storage_options,
    )


def deal(
    pieces: Sequence[Piece], *, sources: Sequence[str], max_rows: int, max_bytes: int, seed: int
) -> list[list[Piece]]:
    """Spread pieces over groups, each source evenly; inside a group they stand by input and position.

    Args:
        sources: Name of the source of each input.
    """
    placed: list[tuple[float, int, int, Piece]] = []
    for rank, name in enumerate(sorted(set(sources))):
        mine = [p for p in pieces if sources[p.file] == name]
        order = permutation(len(mine), seed, 1, rank)
        placed += [((j + 0.5) / len(mine), rank, j, mine[int(i)]) for j, i in enumerate(order)]
    placed.sort(key=lambda entry: entry[:3])
    groups: list[list[Piece]] = []
    rows = size = 0
    for _, _, _, piece in placed:
        full = rows + (piece.num_rows or 0) > max_rows or size + piece.size_bytes > max_bytes
        if not groups or full:
            groups.append([])
            rows = size = 0
        groups[-1].append(piece)
        rows += piece.num_rows or 0
        size += piece.size_bytes
    return [sorted(g, key=lambda p: (p.file, p.first_row, p.start)) for g in groups]


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


def inputs_with_recut(groups: Iterable[Sequence[Piece]]) -> dict[int, list[Piece]]:
    """Pieces that a compressed input has to be recut into, by input."""
    out: dict[int, list[Piece]] = {}
    for group in groups:
        for piece in group:
            if piece.kind is PieceKind.RECUT:
                out.setdefault(piece.file, []).append(piece)
    return {i: sorted(p, key=lambda piece: piece.start) for i, p in sorted(out.items())}
