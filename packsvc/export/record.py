"""What an export made, as it is returned and left in the destination."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from packsvc.types import JsonDict

RECORD, UNFINISHED = "export.json", "unfinished.json"
"""The first stands in a finished destination, the second in one that is being written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What was written, counted from what was read."""

    packs: int
    segments: int
    tokens: int
    loss_tokens: int

    def plus(self, other: Totals) -> Totals:
        """The sum of both."""
        return Totals(
            packs=self.packs + other.packs,
            segments=self.segments + other.segments,
            tokens=self.tokens + other.tokens,
            loss_tokens=self.loss_tokens + other.loss_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedFile:
    """One file of the destination."""

    path: str
    """Relative to the destination."""
    size_bytes: int
    sha256: str
    shard: str | None
    """The shard it was made from; None for what speaks of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A finished export."""

    destination: str
    format: str
    name: str
    plan_id: str
    seq_len: int
    digest: str
    """Of the output it was made from."""
    tokenizer: str
    """Fingerprint of the tokenizer that made the ids."""
    splits: dict[str, Totals]
    files: tuple[ExportedFile, ...]
    notes: tuple[str, ...]
    """What a reader of these files must know or set."""

    @property
    def totals(self) -> Totals:
        total = Totals(packs=0, segments=0, tokens=0, loss_tokens=0)
        for counts in self.splits.values():
            total = total.plus(counts)
        return total

    def to_json(self) -> JsonDict:
        """Plain JSON values. The destination is left out: the same export gives the same bytes anywhere."""
        return {
            "format": self.format,
            "name": self.name,
            "plan_id": self.plan_id,
            "digest": self.digest,
            "tokenizer": self.tokenizer,
            "seq_len": self.seq_len,
            "totals": asdict(self.totals),
            "splits": {name: asdict(counts) for name, counts in self.splits.items()},
            "files": [asdict(file) for file in self.files],
            "notes": list(self.notes),
        }
