"""The plan of a job as `plan.json` keeps it, and what identifies it.

`plan_id` is the sha256 of everything that shapes the output and nothing else: the inputs (source, path as the
job wrote it, size, rows), the job less `name`, `output`, `limits` and `audit_fraction`, the hashes of the
tokenizer's files and of the template, the limit of a trial run, and the format version. Etags, mtimes, dates,
machines and cluster sizes are not in it.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import Any

from packsvc.config import PackJob, parse_job
from packsvc.errors import FormatError
from packsvc.run.json_parts import JsonParts
from packsvc.run.pieces import Groups
from packsvc.types import InputFile, Piece, PieceKind

FORMAT = 1
PLAN_NAME = "plan.json"
SHAPING_PACKAGES = ("packsvc", "pyarrow", "numpy", "transformers", "tokenizers", "jinja2")
"""Packages whose version shapes tokens or bytes; a resume under others is refused."""


def canonical_json(value: Any) -> bytes:
    """The one spelling of plain JSON values: sorted keys, no spaces, UTF-8."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def shaping_versions() -> dict[str, str]:
    """Installed versions of `SHAPING_PACKAGES`."""
    return {name: metadata.version(name) for name in SHAPING_PACKAGES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run does, whole: read by every worker, written once."""

    plan_id: str
    config: dict[str, Any]
    base: str
    """Folder that the job's relative paths start from; not part of the identity."""
    inputs: tuple[InputFile, ...]
    groups: Groups
    readings: dict[str, dict[str, Any]]
    """Source name to the format its rows are read as, and why."""
    encoder: dict[str, Any]
    """Settings that every worker opens its encoder with."""
    versions: dict[str, str]
    limit: int | None = None
    """Rows of each source in a trial run."""
    repacked: dict[str, Any] | None = None
    """Packing again from the shards of another output: its `url`, `plan_id`, `digest`, `seq_len`, `sources`."""

    @property
    def job(self) -> PackJob:
        return parse_job(self.config, base=self.base, where=PLAN_NAME)

    @property
    def num_rows(self) -> int:
        """Rows of the whole job."""
        return self.groups.num_rows

    def moved(self, base: str) -> Plan:
        """The plan as seen from another folder of the job file; paths are relative to it."""
        if base == self.base:
            return self
        job = parse_job(self.config, base=base, where=PLAN_NAME)
        return replace(self, base=base, inputs=tuple(replace(f, url=job.resolve(f.path)) for f in self.inputs))

    def dumps(self) -> bytes:
        """The bytes of `plan.json`: canonical JSON, written a group at a time."""
        members: dict[str, Any] = {
            "base": self.base,
            "config": self.config,
            "encoder": self.encoder,
            "format": FORMAT,
            "groups": ([_small(piece) for piece in group] for group in self.groups),
            "inputs": (asdict(file) for file in self.inputs),
            "limit": self.limit,
            "plan_id": self.plan_id,
            "readings": self.readings,
            **({} if self.repacked is None else {"repacked": self.repacked}),
            "versions": self.versions,
        }
        out = io.BytesIO()
        for place, (key, value) in enumerate(members.items()):
            out.write(b'%s"%s":' % (b"," if place else b"{", key.encode()))
            if not isinstance(value, Iterator):
                out.write(canonical_json(value))
                continue
            out.write(b"[")
            for number, element in enumerate(value):
                out.write((b"," if number else b"") + canonical_json(element))
            out.write(b"]")
        out.write(b"}\n")
        return out.getvalue()

    @classmethod
    def loads(cls, data: bytes, *, where: str = PLAN_NAME) -> Plan:
        """Read `plan.json`. Raises FormatError when it is no plan of this format."""
        try:
            parts = JsonParts(data.decode())
            tree: dict[str, Any] = {}
            for key in parts.members():
                if key == "groups":
                    tree[key] = Groups.of([_piece(piece) for piece in group] for group in parts.elements())
                elif key == "inputs":
                    tree[key] = tuple(InputFile(**file) for file in parts.elements())
                else:
                    tree[key] = parts.value()
            if tree["format"] != FORMAT:
                raise FormatError(f"{where}: format {tree['format']}, this packsvc reads {FORMAT}")
            return cls(
                plan_id=tree["plan_id"],
                config=tree["config"],
                base=tree["base"],
                limit=tree["limit"],
                repacked=tree.get("repacked"),
                versions=tree["versions"],
                encoder=tree["encoder"],
                readings=tree["readings"],
                inputs=tree["inputs"],
                groups=tree["groups"],
            )
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError(f"{where}: not a plan of packsvc ({type(error).__name__}: {error})") from error


_USUAL = {"start": 0, "stop": 0, "first_row": 0, "num_rows": None, "size_bytes": 0, "path": None, "take": None}


def _small(piece: Piece) -> dict[str, Any]:
    """A piece without the fields that stand at their defaults, since a large plan has 100,000 of them."""
    small: dict[str, Any] = {"file": piece.file, "kind": piece.kind}
    for key, usual in _USUAL.items():
        if (value := getattr(piece, key)) != usual:
            small[key] = value
    return small


def _piece(tree: Mapping[str, Any]) -> Piece:
    take = tree.get("take")
    return Piece(**{**tree, "kind": PieceKind(tree["kind"]), "take": tuple(take) if take is not None else None})


def identity(
    *,
    job: PackJob,
    inputs: Sequence[InputFile],
    tokenizer: Mapping[str, Any],
    limit: int | None,
) -> dict[str, Any]:
    """What shapes the output, as plain values; its hash is the plan's id."""
    return {
        "format": FORMAT,
        "job": job.identity(),
        "inputs": [[f.source, f.path, f.size_bytes, f.num_rows] for f in inputs],
        "tokenizer_files": dict(tokenizer["files_sha256"]),
        "template": tokenizer["template_sha256"],
        "limit": limit,
    }


def identity_hash(parts: Mapping[str, Any]) -> str:
    """sha256 of an identity, as hex digits."""
    return hashlib.sha256(canonical_json(parts)).hexdigest()


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Each part in which two identities differ, in words."""
    out: list[str] = []
    if old["format"] != new["format"]:
        out.append(f"format version {old['format']} -> {new['format']}")
    before, after = flat(old["job"]), flat(new["job"])
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            out.append(f"job key {key}: {before.get(key)!r} -> {after.get(key)!r}")
    files, now = {(s, p): (z, r) for s, p, z, r in old["inputs"]}, {(s, p): (z, r) for s, p, z, r in new["inputs"]}
    for source, path in sorted(files.keys() | now.keys()):
        was, is_ = files.get((source, path)), now.get((source, path))
        if was is None:
            out.append(f"input {path} of source {source} is new")
        elif is_ is None:
            out.append(f"input {path} of source {source} is gone")
        elif was != is_:
            out.append(f"input {path}: {was[0]} bytes, {was[1]} rows -> {is_[0]} bytes, {is_[1]} rows")
    for name in sorted(old["tokenizer_files"].keys() | new["tokenizer_files"].keys()):
        if old["tokenizer_files"].get(name) != new["tokenizer_files"].get(name):
            out.append(f"tokenizer file {name}")
    if old["template"] != new["template"]:
        out.append(f"template bytes ({old['template'][:12]} -> {new['template'][:12]})")
    if old["limit"] != new["limit"]:
        out.append(f"limit {old['limit']} -> {new['limit']}")
    return out


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Nested values by dotted path."""
    if isinstance(tree, Mapping) and tree:
        return {k: v for key, value in tree.items() for k, v in flat(value, f"{prefix}{key}.").items()}
    if isinstance(tree, list) and tree:
        return {k: v for i, value in enumerate(tree) for k, v in flat(value, f"{prefix}{i}.").items()}
    return {prefix.rstrip("."): tree}
