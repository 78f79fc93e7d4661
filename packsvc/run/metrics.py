"""Counters for a cluster's Prometheus: groups, rows, tokens and rejects, added up as groups are committed."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any


class GroupCounters:
    """Counters of `ray.util.metrics`, tagged with the job's name and the source; nothing where Ray does not run."""

    def __init__(self, *, job: str, on_ray: bool) -> None:
        self._job = job
        self._counters: dict[str, Any] = {}
        if not on_ray:
            return
        counter: Any = importlib.import_module("ray.util.metrics").Counter
        for name, text, tags in (
            ("groups", "Groups committed.", ("job",)),
            ("packs", "Packs written.", ("job",)),
            ("rows", "Rows read.", ("job", "source")),
            ("tokens", "Tokens of segments.", ("job", "source")),
            ("rejected_rows", "Rows rejected.", ("job", "source", "reason")),
        ):
            self._counters[name] = counter(f"packsvc_{name}", description=text, tag_keys=tags)

    def add(self, commit: Mapping[str, Any]) -> None:
        """Count the commit of one group."""
        if not self._counters:
            return
        self._inc("groups", 1)
        self._inc("packs", sum(shard["num_packs"] for shard in commit["shards"]))
        for source, counts in commit["sources"].items():
            self._inc("rows", counts["rows"], source=source)
            self._inc("tokens", counts["tokens"], source=source)
            for reason, rejected in counts["rejected_by_reason"].items():
                self._inc("rejected_rows", rejected, source=source, reason=str(reason))

    def _inc(self, name: str, value: int, **tags: str) -> None:
        if value > 0:
            self._counters[name].inc(value, tags={"job": self._job, **tags})
