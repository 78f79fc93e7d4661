"""Origins of all segments together: nothing twice, nothing both packed and rejected, no part missing.

The keys of all segments are sorted once: (row key, part, split), 20 bytes a segment and 8 more while sorting;
10 million segments take a few seconds and 300 MB. Places of findings are looked up again in the shards, since
only a few are ever shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from packsvc.shards import ShardEntry
from packsvc.storage import Store
from packsvc.validation.digests import ROW_BITS, is_among
from packsvc.validation.rejects import RejectKeys
from packsvc.validation.report import Failure, Findings


@dataclass(frozen=True, slots=True, kw_only=True)
class Origins:
    """Origins of all S segments of an output, in shard order."""

    row_key: NDArray[np.int64]
    part: NDArray[np.int32]
    shard_offsets: NDArray[np.int64]
    """(shards + 1,)"""
    split: NDArray[np.int64]
    """(shards,) number of each shard's split."""
    complete: bool
    """False when some packs could not be read."""


Where = Callable[[int, int, int], Failure]
"""From (segment number in shard order, row key, part) to a failure without words."""


def check_provenance(
    origins: Origins,
    rejects: RejectKeys,
    *,
    weights: NDArray[np.float64],
    input_names: Sequence[str],
    place: Callable[[int, int, int], tuple[str, int | None, int | None, int | None]],
    findings: Findings,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Every check of origins against one another and against the rejects.

    Args:
        weights: (inputs,) weight of each input's source.
        input_names: Paths of the inputs, for messages.
        place: From (shard, row key, part) to (path, row group, pack, segment).

    Returns:
        (inputs,) rows packed, and (inputs,) rows rejected whole.
    """
    order = np.lexsort((origins.part, origins.row_key))
    key, part = origins.row_key[order], origins.part[order]
    shard = np.searchsorted(origins.shard_offsets, order, side="right") - 1
    split = origins.split[shard]

    def say(check: str, at: NDArray[np.int64], words: Callable[[int], str]) -> None:
        def describe(i: int) -> Failure:
            n = int(at[i])
            path, group, pack, segment = place(int(shard[n]), int(key[n]), int(part[n]))
            file, row = int(key[n]) >> ROW_BITS, int(key[n]) & ((1 << ROW_BITS) - 1)
            name = input_names[file]
            message = f"row {row}, part {int(part[n])} of input {file} ({name}) {words(n)}"
            return Failure(check=check, message=message, shard=path, row_group=group, pack=pack, segment=segment)

        findings.each(check, np.ones(len(at), dtype=np.bool_), describe)

    new_row = np.ones(len(key), dtype=np.bool_)
    new_row[1:] = key[1:] != key[:-1]
    new_pair = new_row.copy()
    new_pair[1:] |= part[1:] != part[:-1]
    first = np.flatnonzero(new_pair)
    often = np.diff(np.append(first, len(key)))
    row_of = np.cumsum(new_row) - 1
    first_of_row = np.flatnonzero(new_row)

    weight = weights[key[first] >> ROW_BITS]
    least, most = np.maximum(1, np.floor(weight)), np.ceil(weight)
    count = np.zeros(len(key), dtype=np.int64)
    count[first] = often
    say(
        "provenance",
        first[often > most],
        lambda n: f"is packed {count[n]} times, the source's weight is {weights[int(key[n]) >> ROW_BITS]:g}",
    )
    if origins.complete:
        say(
            "provenance",
            first[often < least],
            lambda n: f"is packed {count[n]} times only, the source's weight is {weights[int(key[n]) >> ROW_BITS]:g}",
        )
        own = count[first_of_row][row_of[first]]
        say("provenance", first[(often != own) & (often <= most)], lambda n: "is packed more or less often than part 0")
    else:
        findings.notes.append("some packs could not be read: what is missing among rows and parts was not judged")

    findings.saw("splits", len(first_of_row), "rows")
    say("splits", np.flatnonzero(split != split[first_of_row][row_of]), lambda n: "stands in two splits")

    packed_rows = key[first_of_row]
    whole = rejects.part < 0
    _check_records(packed_rows, rejects, findings, complete=origins.complete)
    twice = is_among(packed_rows, np.unique(rejects.row_key[whole]))
    say("provenance", first_of_row[twice], lambda n: "is packed and rejected")
    _check_parts(key[first], part[first], first, rejects, say, complete=origins.complete and rejects.complete)
    inputs = len(weights)
    packed = np.bincount(packed_rows >> ROW_BITS, minlength=inputs)
    refused = np.bincount(np.unique(rejects.row_key[whole]) >> ROW_BITS, minlength=inputs)
    return packed, refused


def _check_records(packed_rows: NDArray[np.int64], rejects: RejectKeys, findings: Findings, *, complete: bool) -> None:
    """Each record once; part records of packed rows only."""
    order = np.lexsort((rejects.part, rejects.row_key))
    r_key, r_part = rejects.row_key[order], rejects.part[order]
    whole = r_part < 0

    def fail(where: NDArray[np.bool_], message: str) -> None:
        def describe(i: int) -> Failure:
            file, row = int(r_key[i]) >> ROW_BITS, int(r_key[i]) & ((1 << ROW_BITS) - 1)
            return Failure(check="rejects", message=f"row {row} of input {file} {message}")

        findings.each("rejects", where, describe)

    again = np.zeros(len(r_key), dtype=np.bool_)
    again[1:] = (r_key[1:] == r_key[:-1]) & (r_part[1:] == r_part[:-1])
    fail(again, "has two records of the same part")
    fail(~whole & is_among(r_key, r_key[whole]), "is rejected whole and in part")
    if complete:
        fail(~whole & ~is_among(r_key, packed_rows), "is rejected in part, but nothing of it is packed")


def _check_parts(
    key: NDArray[np.int64],
    part: NDArray[np.int32],
    first: NDArray[np.int64],
    rejects: RejectKeys,
    say: Callable[[str, NDArray[np.int64], Callable[[int], str]], None],
    *,
    complete: bool,
) -> None:
    """Parts of a row, packed and refused together, count 0, 1, 2, ... without a gap and without one in both."""
    refused = rejects.part >= 0
    all_key = np.concatenate((key, rejects.row_key[refused]))
    all_part = np.concatenate((part, rejects.part[refused]))
    index = np.concatenate((first, np.full(int(refused.sum()), -1)))
    order = np.lexsort((index < 0, all_part, all_key))
    k, p, at = all_key[order], all_part[order], index[order]
    same_row = np.zeros(len(k), dtype=np.bool_)
    same_row[1:] = k[1:] == k[:-1]
    both = same_row.copy()
    both[1:] &= p[1:] == p[:-1]
    say("provenance", at[np.flatnonzero(both) - 1], lambda n: "is packed and rejected")
    if not complete:
        return
    start = np.flatnonzero(~same_row)
    rank = np.arange(len(k)) - np.repeat(start, np.diff(np.append(start, len(k))))
    gaps = (p != rank) & (at >= 0) & ~both
    # Only the first part after a gap is the finding; the later ones follow from it.
    gaps[1:] &= ~(same_row[1:] & (p[:-1] != rank[:-1]))
    say("provenance", at[gaps], lambda n: "stands without the parts before it")


def find_segment(
    store: Store, entry: ShardEntry, *, first_pack: int, row_key: int, part: int
) -> tuple[int | None, int | None, int | None]:
    """Row group, pack and number of a segment, looked up by its origin; Nones when it is not found again."""
    file, row = row_key >> ROW_BITS, row_key & ((1 << ROW_BITS) - 1)
    try:
        with store.open(entry.path) as handle:
            shard = pq.ParquetFile(handle, page_checksum_verification=True)
            pack = first_pack
            for group in range(shard.metadata.num_row_groups):
                columns = ["segment_file", "segment_row", "segment_part"]
                table = shard.read_row_group(group, columns=columns, use_threads=False)
                for origin in zip(*(table.column(c).to_pylist() for c in columns), strict=True):
                    for segment, found in enumerate(zip(*origin, strict=False)):
                        if found == (file, row, part):
                            return group, pack, segment
                    pack += 1
    except (OSError, ValueError, TypeError):
        return None, None, None
    return None, None, None
