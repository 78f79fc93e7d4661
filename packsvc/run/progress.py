"""What a run tells while it goes: `progress.json` in the output, and events for whoever watches."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from packsvc.errors import StorageError
from packsvc.run.planfile import Plan, canonical_json
from packsvc.storage import Store

PROGRESS_NAME = "progress.json"
EVERY_SECONDS = 10.0


@dataclass(slots=True, kw_only=True)
class Progress:
    """How far a run is; adds up the commits that it has seen. Memory does not grow with the job."""

    plan: Plan
    groups_total: int
    started_at: float = field(default_factory=time.time)
    groups_done: int = 0
    groups_found: int = 0
    """Done by an earlier run."""
    groups_running: int = 0
    rows: int = 0
    segments: int = 0
    tokens: int = 0
    tokens_here: int = 0
    """Of this run, for the rate."""
    packed_tokens: int = 0
    packs: int = 0
    rejected_by_reason: dict[str, int] = field(default_factory=dict)
    stage: str = "packing"

    def add(self, commit: Mapping[str, Any], *, found: bool = False) -> None:
        """Count a commit."""
        self.groups_done += 1
        self.groups_found += found
        for source in commit["sources"].values():
            self.rows += source["rows"]
            self.segments += source["segments"]
            self.tokens += source["tokens"]
            self.tokens_here += 0 if found else source["tokens"]
            for reason, n in source["rejected_by_reason"].items():
                self.rejected_by_reason[reason] = self.rejected_by_reason.get(reason, 0) + n
        for shard in commit["shards"]:
            self.packs += shard["num_packs"]
            self.packed_tokens += shard["num_tokens"]

    @property
    def efficiency(self) -> float:
        """Of the packs written so far."""
        slots = self.packs * int(self.plan.config["seq_len"])
        return self.packed_tokens / slots if slots else 0.0

    @property
    def seconds(self) -> float:
        return max(time.time() - self.started_at, 1e-9)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_here / self.seconds

    @property
    def eta_seconds(self) -> float | None:
        """Seconds to the end at the rate so far; None before the first group of this run."""
        here = self.groups_done - self.groups_found
        return None if here <= 0 else self.seconds / here * (self.groups_total - self.groups_done)

    def to_json(self) -> dict[str, Any]:
        """The content of `progress.json`."""
        return {
            "plan_id": self.plan.plan_id,
            "stage": self.stage,
            "started_at": self.started_at,
            "updated_at": time.time(),
            "groups_total": self.groups_total,
            "groups_done": self.groups_done,
            "groups_running": self.groups_running,
            "rows": self.rows,
            "rows_total": self.plan.num_rows,
            "tokens": self.tokens,
            "tokens_per_second": self.tokens_per_second,
            "efficiency": self.efficiency,
            "rejected_by_reason": dict(sorted(self.rejected_by_reason.items())),
            "eta_seconds": self.eta_seconds,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something worth telling a person."""

    kind: str
    """"message", "warning", "progress" or "done"."""
    text: str = ""
    progress: Progress | None = None


Watch = Callable[[Event], None]


class Reporter:
    """Sends events to the watcher and replaces `progress.json` every ten seconds."""

    def __init__(self, store: Store | None, watch: Watch | None) -> None:
        self._store = store
        self._watch = watch or (lambda event: None)
        self._written = 0.0

    def say(self, text: str) -> None:
        self._watch(Event(kind="message", text=text))

    def warn(self, text: str) -> None:
        self._watch(Event(kind="warning", text=text))

    def beat(self, progress: Progress, *, force: bool = False) -> None:
        """Tell how far the run is."""
        self._watch(Event(kind="progress", progress=progress))
        if self._store is not None and (force or time.monotonic() - self._written >= EVERY_SECONDS):
            self._written = time.monotonic()
            try:
                self._store.publish(PROGRESS_NAME, canonical_json(progress.to_json()) + b"\n")
            except StorageError as error:
                self.warn(f"progress could not be written: {error}")
