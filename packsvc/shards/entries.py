"""The lines of a manifest: inputs, shards, reject files, tables. Unknown keys are kept."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from packsvc.shards.parsing import Value
from packsvc.types import JsonDict


@dataclass(frozen=True, slots=True, kw_only=True)
class InputEntry:
    """A file that rows were read from."""

    path: str
    """As the job wrote it."""
    source: str
    size_bytes: int
    etag: str | None
    mtime: float | None
    num_rows: int | None
    """None after a trial run, which counts nothing."""
    extra: JsonDict = field(default_factory=dict)

    @classmethod
    def read(cls, value: Value) -> InputEntry:
        """From JSON. Raises FormatError."""
        etag, mtime, rows = value.get("etag"), value.get("mtime"), value.get("num_rows")
        return cls(
            path=value.get("path").text(),
            source=value.get("source").text(),
            size_bytes=value.get("size_bytes").integer(),
            etag=None if etag.is_null else etag.text(),
            mtime=None if mtime.is_null else mtime.number(),
            num_rows=None if rows.is_null else rows.integer(),
            extra=_extra(cls, value),
        )

    def to_json(self) -> JsonDict:
        """As JSON values, in the order of the contract."""
        return _plain(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """One shard; pack numbers count over these in order."""

    path: str
    """Relative to OUT."""
    split: str
    size_bytes: int
    sha256: str
    num_packs: int
    num_segments: int
    num_tokens: int
    num_loss_tokens: int
    extra: JsonDict = field(default_factory=dict)

    @classmethod
    def read(cls, value: Value) -> ShardEntry:
        """From JSON. Raises FormatError."""
        return cls(
            path=value.get("path").path(),
            split=value.get("split").text(),
            size_bytes=value.get("size_bytes").integer(),
            sha256=value.get("sha256").sha256(),
            num_packs=value.get("num_packs").integer(),
            num_segments=value.get("num_segments").integer(),
            num_tokens=value.get("num_tokens").integer(),
            num_loss_tokens=value.get("num_loss_tokens").integer(),
            extra=_extra(cls, value),
        )

    def to_json(self) -> JsonDict:
        """As JSON values, in the order of the contract."""
        return _plain(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectEntry:
    """A file of rejected rows."""

    path: str
    """Relative to OUT."""
    size_bytes: int
    sha256: str
    num_rows: int
    extra: JsonDict = field(default_factory=dict)

    @classmethod
    def read(cls, value: Value) -> RejectEntry:
        """From JSON. Raises FormatError."""
        return cls(
            path=value.get("path").path(),
            size_bytes=value.get("size_bytes").integer(),
            sha256=value.get("sha256").sha256(),
            num_rows=value.get("num_rows").integer(),
            extra=_extra(cls, value),
        )

    def to_json(self) -> JsonDict:
        """As JSON values, in the order of the contract."""
        return _plain(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableEntry:
    """A Parquet table about the whole output."""

    path: str
    """Relative to OUT."""
    size_bytes: int
    sha256: str
    extra: JsonDict = field(default_factory=dict)

    @classmethod
    def read(cls, value: Value) -> TableEntry:
        """From JSON. Raises FormatError."""
        return cls(
            path=value.get("path").path(),
            size_bytes=value.get("size_bytes").integer(),
            sha256=value.get("sha256").sha256(),
            extra=_extra(cls, value),
        )

    def to_json(self) -> JsonDict:
        """As JSON values, in the order of the contract."""
        return _plain(self)


def _extra(cls: Any, value: Value) -> JsonDict:
    return value.rest(tuple(f.name for f in fields(cls)))


def _plain(entry: Any) -> JsonDict:
    known = {f.name: getattr(entry, f.name) for f in fields(entry) if f.name != "extra"}
    return {**known, **entry.extra}
