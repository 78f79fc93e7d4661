"""What workers run: a task is a call with small arguments and a small answer, safe to repeat.

A task names its plan by where it stands; each worker process reads a plan once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from packsvc.config import Limits
from packsvc.errors import StateError
from packsvc.run.group import pack_group, pack_tail_group, repack_group
from packsvc.run.planfile import PLAN_NAME, Plan
from packsvc.sources import InputCount, count_input, recut_input
from packsvc.storage import Store
from packsvc.types import InputFile, Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Where a worker finds the plan."""

    url: str
    options: dict[str, Any]
    plan_id: str
    base: str
    """Folder of the job file as the driver sees it; the whole job may have moved since the plan was made."""


@lru_cache(maxsize=2)
def plan_of(url: str, options: str, plan_id: str, base: str) -> tuple[Plan, Store]:
    """The plan, read once in each worker process."""
    store = Store(url, storage_options=json.loads(options))
    plan = Plan.loads(store.read(PLAN_NAME), where=store.describe(PLAN_NAME))
    if plan.plan_id != plan_id:
        raise StateError(f"{store.describe(PLAN_NAME)}: plan {plan.plan_id[:12]}, expected {plan_id[:12]}")
    return plan.moved(_base_here(base)), store


def _base_here(base: str) -> str:
    """The job's folder as this worker sees it: what was submitted is unpacked under each node's own session folder."""
    name = os.path.basename(os.getcwd())
    _, found, below = f"{base}/".partition(f"/{name}/")
    return base if os.path.isdir(base) or not found else os.path.join(os.getcwd(), below).rstrip("/")


def group_task(where: Where, group: int, limits: dict[str, float]) -> dict[str, Any]:
    plan, store = plan_of(where.url, json.dumps(where.options), where.plan_id, where.base)
    if plan.repacked is not None:
        return slim(repack_group(plan, group, store))
    return slim(pack_group(plan, group, store, limits=Limits(**limits)))


def tail_task(where: Where, group: int, senders: Sequence[int]) -> dict[str, Any]:
    plan, store = plan_of(where.url, json.dumps(where.options), where.plan_id, where.base)
    return slim(pack_tail_group(plan, group, senders, store))


def count_task(file: InputFile, options: dict[str, Any], max_rows: int) -> InputCount:
    return count_input(file, storage_options=options, max_rows=max_rows)


def recut_task(url: str, options: dict[str, Any], index: int, file: InputFile, pieces: Sequence[Piece]) -> None:
    recut_input(index, file, pieces, Store(url, storage_options=options), storage_options=options)


def slim(record: Mapping[str, Any]) -> dict[str, Any]:
    """What the driver needs of a commit: under a few kilobytes, whatever the group held."""
    keys = ("num_packs", "num_tokens")
    return {
        "group": record["group"],
        "sources": record["sources"],
        "shards": [{key: shard[key] for key in keys} for shard in record["shards"]],
        "tails": record["tails"] and {"num_segments": record["tails"]["num_segments"]},
    }
