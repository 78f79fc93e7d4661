"""What a validation found: checks, how much each looked at, and the first failures of each.

A finding never stops the validation. `Findings` collects them for one unit of work (a shard, a manifest, a
batch of rows); findings of several units add up in the order given, so that the report is the same for any
number of workers. Of each check only the first `KEPT_PER_UNIT` failures of a unit are kept word for word, all
of them are counted: a shard of random bytes would otherwise give a report larger than itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

KEPT_PER_UNIT = 5
KEPT_PER_CHECK = 100

CHECKS: dict[str, str] = {
    "manifest": "the manifest fits its own config and plan.json",
    "hashes": "size and sha256 of every file that the manifest names, and page checksums",
    "files": "every file under shards/ and rejects/ is named by the manifest",
    "schema": "column names, types, nulls and file metadata of every shard",
    "geometry": "cu_seqlens, position_ids, lengths, alignment, padding tail and ids of every pack",
    "mask": "loss_mask is 0 on tails and segment starts, has a target in every segment, and agrees with its count",
    "weights": "loss_weight is finite, 0 off target, above 0 on target, and there as the config says",
    "provenance": "origin of every segment: known inputs, no row twice beyond its weight, parts without gaps",
    "splits": "packs stand in shards of their own split, and no row in two splits",
    "rejects": "reject records against the manifest's counts and against the packed rows",
    "counts": "counts of shards, splits, sources and totals against the packs themselves",
    "accounts": "rows and tokens that went in equal those that came out",
    "tables": "packs.parquet and lengths.parquet against the packs themselves",
    "sources": "ids, mask, weights, split and verdict of rows encoded afresh by the slow method",
}
"""Every check by its stable name, in the order of the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One finding and its place; what does not apply is None."""

    check: str
    message: str
    shard: str | None = None
    """Path of the file, relative to the output."""
    row_group: int | None = None
    pack: int | None = None
    """Over all shards in manifest order, as `packsvc show --pack` counts."""
    segment: int | None = None
    """Inside the pack."""

    def __str__(self) -> str:
        place = [self.shard] if self.shard is not None else []
        place += [
            f"{name} {value}"
            for name, value in (("row group", self.row_group), ("pack", self.pack), ("segment", self.segment))
            if value is not None
        ]
        return f"{self.check}: {', '.join(place)}{': ' if place else ''}{self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of a report."""

    name: str
    what: str
    checked: int
    """How many things were looked at."""
    unit: str
    """What these things are, e.g. "packs"."""
    failures: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The verdict on a packed output."""

    output: str
    plan_id: str
    manifest_digest: str
    against_sources: bool
    sample: int | None
    num_packs: int
    num_tokens: int
    checks: list[Check]
    failures: list[Failure]
    """The first of each check; `num_failures` counts all."""
    num_failures: int
    notes: list[str] = field(default_factory=list)
    """What could not be checked, and why."""

    @property
    def ok(self) -> bool:
        """True when no check failed."""
        return self.num_failures == 0

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "ok": self.ok,
            "output": self.output,
            "plan_id": self.plan_id,
            "manifest_digest": self.manifest_digest,
            "against_sources": self.against_sources,
            "sample": self.sample,
            "num_packs": self.num_packs,
            "num_tokens": self.num_tokens,
            "num_failures": self.num_failures,
            "checks": [asdict(check) for check in self.checks],
            "failures": [asdict(failure) for failure in self.failures],
            "notes": list(self.notes),
        }


@dataclass(slots=True)
class Findings:
    """Failures and counts of one unit of work."""

    failures: list[Failure] = field(default_factory=list)
    failed: dict[str, int] = field(default_factory=dict)
    checked: dict[str, tuple[int, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def saw(self, check: str, number: int, unit: str) -> None:
        """Count what a check looked at."""
        before = self.checked.get(check, (0, unit))[0]
        self.checked[check] = (before + int(number), unit)

    def fail(
        self,
        check: str,
        message: str,
        *,
        shard: str | None = None,
        row_group: int | None = None,
        pack: int | None = None,
        segment: int | None = None,
    ) -> None:
        """Record one failure."""
        self.failed[check] = self.failed.get(check, 0) + 1
        if sum(f.check == check for f in self.failures) < KEPT_PER_UNIT:
            self.failures.append(
                Failure(check=check, message=message, shard=shard, row_group=row_group, pack=pack, segment=segment)
            )

    def equal(self, check: str, what: str, found: Any, stated: Any, **place: Any) -> bool:
        """Fail unless what was found is what is stated; floats may differ in their last digits."""
        if isinstance(found, float) and isinstance(stated, (int, float)):
            same = abs(found - stated) <= 1e-9 * max(1.0, abs(found))
        else:
            same = type(found) is type(stated) and found == stated
        if not same:
            self.fail(check, f"{what} is {stated!r}, found {found!r}", **place)
        return same

    def each(self, check: str, where: NDArray[np.bool_], describe: Callable[[int], Failure]) -> None:
        """Record a failure for every True; only those that are kept are described."""
        hits = np.flatnonzero(where)
        if not len(hits):
            return
        room = KEPT_PER_UNIT - sum(f.check == check for f in self.failures)
        self.failures.extend(describe(int(i)) for i in hits[: max(0, room)])
        self.failed[check] = self.failed.get(check, 0) + len(hits)

    def merge(self, others: Iterable[Findings]) -> None:
        """Add the findings of other units, in order."""
        kept = {check: sum(f.check == check for f in self.failures) for check in CHECKS}
        for other in others:
            for failure in other.failures:
                if kept[failure.check] < KEPT_PER_CHECK:
                    kept[failure.check] += 1
                    self.failures.append(failure)
            for check, number in other.failed.items():
                self.failed[check] = self.failed.get(check, 0) + number
            for check, (number, unit) in other.checked.items():
                self.saw(check, number, unit)
            self.notes.extend(other.notes)

    def lines(self) -> list[Check]:
        """One line for every check that ran, in the order of `CHECKS`."""
        out = []
        for name, what in CHECKS.items():
            if name in self.checked or name in self.failed:
                number, unit = self.checked.get(name, (0, ""))
                unit = unit.removesuffix("s") if number == 1 else unit
                out.append(Check(name=name, what=what, checked=number, unit=unit, failures=self.failed.get(name, 0)))
        return out

    def sorted_failures(self) -> list[Failure]:
        """By check in the order of `CHECKS`; inside a check as found."""
        order = {name: i for i, name in enumerate(CHECKS)}
        return sorted(self.failures, key=lambda f: order[f.check])
