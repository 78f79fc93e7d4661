"""The packed segments against their sources: every row, or a sample, read and encoded again by the slow method.

The pass over the shards kept a digest of every segment (`digests`), the pass over the sources makes the digests
of fresh ones (`fresh`); here they meet. Compared are ids, mask and weights, how often a row is packed, its split,
its verdict (packed, rejected and why, filtered, left out), and, when all rows are read, the counts of each source.
A segment that differs is looked up on both sides, so that the finding names the first token that differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packsvc.errors import FormatError
from packsvc.shards import PLAN, Manifest
from packsvc.storage import Store
from packsvc.types import Counts, EncodedBatch, Piece, PieceKind
from packsvc.validation.digests import ROW_BITS, SegmentDigests, Wanted
from packsvc.validation.fresh import FreshRows, FreshSetting, encode_piece, encoded
from packsvc.validation.parallel import Work, run_over
from packsvc.validation.rejects import REASONS, RejectKeys
from packsvc.validation.report import KEPT_PER_UNIT, Failure, Findings
from packsvc.validation.source_pieces import check_unchanged, pieces_of, sampled_pieces, setting_of
from packsvc.validation.stored import StoredSegment, stored_segment

COUNTED = (
    "rows",
    "packed",
    "rejected",
    "rejected_parts",
    "filtered",
    "left_out",
    "truncated",
    "split",
    "reasoning_dropped",
    "edge_tokens",
    "turns_without_stop",
    "encoded_tokens",
    "repeated_tokens",
    "cut_tokens",
    "rejected_tokens",
)


class Comparison:
    """One comparison with the sources; finds them when it is made, before the long pass over the shards."""

    def __init__(self, store: Store, manifest: Manifest, plan: Mapping[str, Any] | None, *, sample: int | None) -> None:
        """Raises FormatError (no plan.json), SourceError (an input is gone or changed)."""
        if plan is None:
            raise FormatError(f"{store.describe(PLAN)}: is missing or no JSON; it says where the sources are")
        self.store, self.manifest = store, manifest
        self.setting = setting_of(store, plan)
        for file in self.setting.inputs:
            check_unchanged(file, storage_options=store.storage_options)
        self.pieces = pieces_of(plan)
        self.sampled = sample is not None
        if sample is not None:
            self.pieces = sampled_pieces(self.pieces, self.setting.inputs, sample, seed=manifest.seed)
        keys = [p.file << ROW_BITS | row for p in self.pieces for row in p.take or ()] if self.sampled else None
        self.wanted = Wanted(row_keys=None if keys is None else np.array(sorted(keys), dtype=np.int64))

    def run(
        self, packed: SegmentDigests, rejects: RejectKeys, findings: Findings, *, workers: int, address: str | None
    ) -> None:
        """Encode and compare; what differs becomes a finding of the check `sources`."""
        packed = packed.sorted()
        seen = np.zeros(len(packed.row_key), dtype=np.bool_)
        chosen = self.wanted.choose(rejects.row_key)
        order = np.lexsort((rejects.part[chosen], rejects.row_key[chosen]))
        recorded = RejectKeys(
            row_key=rejects.row_key[chosen][order],
            part=rejects.part[chosen][order],
            reason=rejects.reason[chosen][order],
            complete=rejects.complete,
        )
        judged = np.zeros(len(recorded.row_key), dtype=np.bool_)
        counts: dict[str, Counts] = {}
        encode = partial(encode_piece, setting=self.setting)
        for piece, fresh in zip(
            self.pieces, run_over(encode, self.pieces, work=Work.PYTHON, workers=workers, address=address), strict=True
        ):
            findings.saw("sources", fresh.counts.rows, "rows")
            counts.setdefault(fresh.source, Counts()).add(fresh.counts)
            self._segments(piece, fresh, packed, seen, findings)
            self._rejects(fresh, recorded, judged, findings)
        self._unseen(packed, seen, recorded, judged, findings)
        if not self.sampled:
            self._counts(counts, findings)

    def _segments(
        self, piece: Piece, fresh: FreshRows, packed: SegmentDigests, seen: NDArray[np.bool_], findings: Findings
    ) -> None:
        low = np.searchsorted(packed.row_key, fresh.row_key, side="left")
        high = np.searchsorted(packed.row_key, fresh.row_key, side="right")
        splits = sorted(self.manifest.splits)
        for i in range(len(fresh.row_key)):
            mine = [n for n in range(int(low[i]), int(high[i])) if packed.part[n] == fresh.part[i]]
            seen[mine] = True
            key, part = int(fresh.row_key[i]), int(fresh.part[i])
            if len(mine) != fresh.copies[i]:
                message = f"{self.name(key, part)} is packed {len(mine)} times, must be {fresh.copies[i]}"
                self._fail(findings, lambda m=message: Failure(check="sources", message=m))  # type: ignore[misc]
            for n in mine:
                where = self.manifest.shards[int(packed.shard[n])].split
                if where != splits[fresh.split[i]]:
                    message = f"{self.name(key, part)} stands in split {where}, must be in {splits[fresh.split[i]]}"
                    self._fail(findings, partial(self._at, packed, n, message))
                if packed.digest[n] != fresh.digest[i]:
                    self._fail(findings, partial(self._differing, piece, packed, n))

    def _rejects(self, fresh: FreshRows, recorded: RejectKeys, judged: NDArray[np.bool_], findings: Findings) -> None:
        low = np.searchsorted(recorded.row_key, fresh.reject_key, side="left")
        high = np.searchsorted(recorded.row_key, fresh.reject_key, side="right")
        for i in range(len(fresh.reject_key)):
            key, part = int(fresh.reject_key[i]), int(fresh.reject_part[i])
            reason = REASONS[int(fresh.reject_reason[i])]
            mine = [n for n in range(int(low[i]), int(high[i])) if recorded.part[n] == part]
            judged[mine] = True
            if not mine:
                message = f"{self.name(key, part)} must be rejected ({reason}), there is no record of it"
            elif recorded.reason[mine[0]] != fresh.reject_reason[i]:
                message = f"{self.name(key, part)} is rejected for {REASONS[int(recorded.reason[mine[0]])]}"
                message += f", must be for {reason}"
            else:
                continue
            self._fail(findings, partial(Failure, check="sources", message=message))

    def _unseen(
        self,
        packed: SegmentDigests,
        seen: NDArray[np.bool_],
        recorded: RejectKeys,
        judged: NDArray[np.bool_],
        findings: Findings,
    ) -> None:
        """What stands in the output and no row of the sources gives."""
        for n in np.flatnonzero(~seen).tolist():
            message = f"{self.name(int(packed.row_key[n]), int(packed.part[n]))} is packed, but its source gives none"
            self._fail(findings, partial(self._at, packed, n, message))
        for n in np.flatnonzero(~judged).tolist():
            message = f"{self.name(int(recorded.row_key[n]), int(recorded.part[n]))} is recorded as rejected"
            message += f" ({REASONS[int(recorded.reason[n])]}), but is not rejected now"
            self._fail(findings, partial(Failure, check="sources", message=message))

    def _counts(self, counts: Mapping[str, Counts], findings: Findings) -> None:
        """Counts of every source, when all of its rows were read."""
        for name, stated in self.manifest.sources.items():
            found = asdict(counts.get(name, Counts()))
            for key in COUNTED:
                findings.equal("sources", f"sources.{name}.{key}", found[key], stated[key])

    def _fail(self, findings: Findings, make: Callable[[], Failure]) -> None:
        """Record a failure; only those that are kept are worth looking up."""
        if sum(f.check == "sources" for f in findings.failures) < KEPT_PER_UNIT:
            findings.failures.append(make())
        findings.failed["sources"] = findings.failed.get("sources", 0) + 1

    def name(self, key: int, part: int) -> str:
        """A row, or a part of one, as a person finds it."""
        file, row = key >> ROW_BITS, key & ((1 << ROW_BITS) - 1)
        words = f"row {row} of input {file} ({self.setting.inputs[file].path})"
        return words if part < 0 else f"{words}, part {part},"

    def _at(self, packed: SegmentDigests, n: int, message: str) -> Failure:
        stored = self._stored(packed, n)
        return Failure(
            check="sources",
            message=message,
            shard=self.manifest.shards[int(packed.shard[n])].path,
            row_group=None if stored is None else stored.row_group,
            pack=int(packed.pack[n]),
            segment=int(packed.segment[n]),
        )

    def _stored(self, packed: SegmentDigests, n: int) -> StoredSegment | None:
        shard = int(packed.shard[n])
        inside = int(packed.pack[n]) - int(self.manifest.pack_offsets[shard])
        return stored_segment(self.store, self.manifest.shards[shard], pack=inside, segment=int(packed.segment[n]))

    def _differing(self, piece: Piece, packed: SegmentDigests, n: int) -> Failure:
        """A segment that differs, with the first token that does."""
        key, part = int(packed.row_key[n]), int(packed.part[n])
        stored, again = self._stored(packed, n), fresh_segment(piece, self.setting, key & ((1 << ROW_BITS) - 1), part)
        words = "differs from a fresh encode"
        if stored is not None and again is not None:
            words = first_difference(stored, again)
        return self._at(packed, n, f"{self.name(key, part)} {words}")


def fresh_segment(piece: Piece, setting: FreshSetting, row: int, part: int) -> StoredSegment | None:
    """One segment of one row, encoded once more to be shown."""
    one = Piece(file=piece.file, kind=PieceKind.WHOLE, take=(row,))
    batches: Iterator[tuple[EncodedBatch, dict[int, int]]] = encoded(one, setting, Counts(), [])
    for batch, _ in batches:
        for i in np.flatnonzero(batch.part == part).tolist():
            span = slice(int(batch.offsets[i]), int(batch.offsets[i + 1]))
            weight = None if batch.loss_weight is None else batch.loss_weight[span]
            return StoredSegment(
                row_group=-1, input_ids=batch.input_ids[span], loss_mask=batch.loss_mask[span], loss_weight=weight
            )
    return None


def first_difference(stored: StoredSegment, fresh: StoredSegment) -> str:
    """In words, the first token in which two segments differ."""
    lengths = len(stored.input_ids), len(fresh.input_ids)
    common = min(lengths)
    names = ("input_ids", "loss_mask", "loss_weight")
    firsts = []
    for name in names:
        one, other = getattr(stored, name), getattr(fresh, name)
        if one is not None and other is not None:
            differs = np.flatnonzero(one[:common] != other[:common])
            firsts += [(int(differs[0]), names.index(name), name)] if len(differs) else []
    if not firsts:
        return f"has {lengths[0]} tokens, a fresh encode gives {lengths[1]}"
    at, _, name = min(firsts)
    one, other = getattr(stored, name)[at].item(), getattr(fresh, name)[at].item()
    return f"differs from a fresh encode at its token {at}: {name} is {one}, must be {other}"
