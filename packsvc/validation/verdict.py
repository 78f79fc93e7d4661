"""A verdict kept beside the manifest, so that a trainer can ask whether an output was checked.

`verdict.json` holds the report and the sha256 of the manifest.json that it is about. It is written whole. A verdict on
another manifest is never taken for one on this: reading it raises.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from packsvc.errors import FormatError, StateError
from packsvc.shards import MANIFEST, Manifest
from packsvc.storage import Store
from packsvc.validation.report import Report

VERDICT = "verdict.json"
FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredVerdict:
    """What a validation found, when, by which version, on which manifest."""

    ok: bool
    validated_at: str
    """UTC, to the second."""
    packsvc_version: str
    manifest_sha256: str
    """Of the bytes of manifest.json."""
    report: dict[str, Any]
    """`Report.to_json()`."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, as stored."""
        return {
            "format": FORMAT,
            "ok": self.ok,
            "validated_at": self.validated_at,
            "packsvc_version": self.packsvc_version,
            "manifest_sha256": self.manifest_sha256,
            "report": self.report,
        }


def save_verdict(report: Report, *, storage_options: Mapping[str, Any] | None = None) -> StoredVerdict:
    """Write a report into the output it is about, over an earlier verdict.

    Raises:
        StateError: The output's manifest is not the one that was validated.
        StorageError: The output cannot be written to.
    """
    store = Store(report.output, storage_options=storage_options)
    manifest = store.read(MANIFEST)
    digest = Manifest.from_json(json.loads(manifest)).digest
    if digest != report.manifest_digest:
        raise StateError(
            f"{store.describe(MANIFEST)} changed while it was validated (digest {report.manifest_digest[:12]} then, "
            f"{digest[:12]} now); no verdict was stored: validate again"
        )
    now = datetime.datetime.now(datetime.UTC)
    verdict = StoredVerdict(
        ok=report.ok,
        validated_at=now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        packsvc_version=version("packsvc"),
        manifest_sha256=hashlib.sha256(manifest).hexdigest(),
        report=report.to_json(),
    )
    store.publish(VERDICT, json.dumps(verdict.to_json(), indent=1).encode() + b"\n")
    return verdict


def load_verdict(out: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> StoredVerdict:
    """The verdict stored with an output, if it is about the manifest that stands there.

    Raises:
        FormatError: There is no manifest, no verdict, or one that cannot be read.
        StateError: The verdict is about another manifest.
    """
    store = Store(os.fspath(out), storage_options=storage_options)
    Manifest.load(store)  # an unfinished or foreign output is named as such
    try:
        tree = json.loads(store.read(VERDICT))
        if tree["format"] != FORMAT:
            raise ValueError(f"format {tree['format']!r}, this version reads {FORMAT}")
        verdict = StoredVerdict(
            ok=tree["ok"] is True and tree["report"]["ok"] is True,
            validated_at=str(tree["validated_at"]),
            packsvc_version=str(tree["packsvc_version"]),
            manifest_sha256=str(tree["manifest_sha256"]),
            report=dict(tree["report"]),
        )
    except FileNotFoundError:
        raise FormatError(f"{store.url}: no verdict is stored here; run `packsvc validate OUT --save`") from None
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{store.describe(VERDICT)} is not a verdict ({error!r}); validate again") from error
    now = hashlib.sha256(store.read(MANIFEST)).hexdigest()
    if now != verdict.manifest_sha256:
        raise StateError(
            f"{store.describe(VERDICT)} of {verdict.validated_at} is about another manifest (sha256 "
            f"{verdict.manifest_sha256[:12]}, now {now[:12]}): run `packsvc validate OUT --save` again"
        )
    return verdict
