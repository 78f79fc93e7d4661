"""Which parts of the sources to read again: the plan's own pieces, or a seeded sample of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from packsvc.config import Format, parse_job
from packsvc.errors import FormatError, SourceError
from packsvc.shards import PLAN
from packsvc.sources import Reading, content_hash
from packsvc.storage import Store, file_info, filesystem
from packsvc.types import InputFile, Piece, PieceKind
from packsvc.validation.fresh import FreshSetting


def setting_of(store: Store, plan: Mapping[str, Any]) -> FreshSetting:
    """What the plan says of inputs, formats and encoder. Raises FormatError."""
    try:
        config = dict(plan["config"])
        if again := plan.get("repacked"):
            # Its segments were made under the first seq_len, and overlong rows judged by it.
            config["seq_len"] = again["seq_len"]
            config["packing"] = {**config["packing"], "align": again["align"]}
        return FreshSetting(
            job=parse_job(config, base=plan["base"], where=store.describe(PLAN)),
            inputs=tuple(InputFile(**file) for file in plan["inputs"]),
            readings={
                name: Reading(format=Format(tree["format"]), columns=tree["columns"], why=tree["why"])
                for name, tree in plan["readings"].items()
            },
            encoder=dict(plan["encoder"]),
            store=store,
            storage_options=store.storage_options,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{store.describe(PLAN)}: no plan of packsvc ({type(error).__name__}: {error})") from error


def check_unchanged(file: InputFile, *, storage_options: Mapping[str, Any]) -> None:
    """Raises SourceError when an input is gone, or is not the one that was packed."""
    fs, path = filesystem(file.url, storage_options)
    try:
        info = file_info(path, fs.info(path))
    except FileNotFoundError:
        raise SourceError(
            f"{file.path}: is gone ({file.url}); put it back, or validate without comparing with the sources"
        ) from None
    if info.size_bytes != file.size_bytes:
        raise SourceError(f"{file.path}: has {info.size_bytes} bytes, {file.size_bytes} when it was packed: it changed")
    if (info.mtime, info.etag) == (file.mtime, file.etag) or file.content_hash is None:
        return
    if content_hash(file, storage_options=storage_options) != file.content_hash:
        raise SourceError(f"{file.path}: its content changed since it was packed; put the old file back")


def pieces_of(plan: Mapping[str, Any]) -> list[Piece]:
    """The plan's pieces by input, in order; an input that was recut is read whole, since its cuts may be gone."""
    if plan.get("repacked"):
        return _all_rows(plan)
    pieces = [
        Piece(**{**tree, "kind": PieceKind(tree["kind"]), "take": tuple(tree["take"]) if tree.get("take") else None})
        for group in plan["groups"]
        for tree in group
    ]
    recut = {p.file for p in pieces if p.kind is PieceKind.RECUT}
    whole = [
        Piece(
            file=file,
            kind=PieceKind.WHOLE,
            num_rows=sum(p.num_rows or 0 for p in pieces if p.file == file),
        )
        for file in sorted(recut)
    ]
    kept = [p for p in pieces if p.file not in recut]
    return sorted(whole + kept, key=lambda p: (p.file, p.first_row, p.start))


def _all_rows(plan: Mapping[str, Any]) -> list[Piece]:
    """Every input whole: the groups of an output that was packed again are packs of the one before."""
    if plan.get("limit") is not None:
        raise FormatError(
            "this output was packed again from a trial run, and which rows that took is not known here; "
            "compare the first output with its sources"
        )
    return [
        Piece(file=index, kind=PieceKind.WHOLE, num_rows=file["num_rows"]) for index, file in enumerate(plan["inputs"])
    ]


def sampled_pieces(pieces: list[Piece], inputs: tuple[InputFile, ...], sample: int, *, seed: int) -> list[Piece]:
    """One piece for each input with sampled rows; `sample` rows in all, drawn evenly over those of the job."""
    takes = [np.array(p.take) if p.take is not None else None for p in pieces]
    sizes = np.array(
        [(p.num_rows or 0) if t is None else len(t) for p, t in zip(pieces, takes, strict=True)], dtype=np.int64
    )
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    drawn = np.random.Generator(np.random.PCG64(seed)).choice(total, size=min(sample, total), replace=False)
    rows: dict[int, list[int]] = {}
    for number in np.sort(drawn).tolist():
        index = int(np.searchsorted(ends, number, side="right"))
        inside, take = number - int(ends[index] - sizes[index]), takes[index]
        row = pieces[index].first_row + inside if take is None else int(take[inside])
        rows.setdefault(pieces[index].file, []).append(row)
    return [
        Piece(file=file, kind=PieceKind.WHOLE, num_rows=len(mine), take=tuple(sorted(mine)))
        for file, mine in sorted(rows.items())
    ]
