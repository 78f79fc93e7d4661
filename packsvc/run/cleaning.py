"""What a run leaves behind and no reader needs: files that no plan, commit or manifest names."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from packsvc.errors import FormatError, StateError
from packsvc.run.finish import LENGTHS_NAME, MANIFEST_NAME, PACKS_NAME
from packsvc.run.planfile import PLAN_NAME, Plan
from packsvc.run.progress import PROGRESS_NAME
from packsvc.storage import FileInfo, Store

ALIVE_SECONDS = 60.0
SWEPT_FOLDERS = ("shards/", "rejects/", "tails/", "recut/")
OWN_FOLDERS = (*SWEPT_FOLDERS, "commits/", "failures/")
OWN_FILES = (PLAN_NAME, MANIFEST_NAME, PROGRESS_NAME, PACKS_NAME, LENGTHS_NAME, "verdict.json")
_TEMPORARY = re.compile(r"\.\d+-[0-9a-f]{8}\.tmp\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleaned:
    """What was, or would be, removed."""

    files: tuple[str, ...]
    size_bytes: int
    kept: tuple[str, ...]
    """With `everything`: files in the folder that are not packsvc's, which stay."""


def clean(
    out: str,
    *,
    everything: bool = False,
    dry_run: bool = False,
    force: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Cleaned:
    """Remove leftovers of a packsvc output, or all of it.

    Args:
        out: Folder or URL.
        everything: Remove the output whole, not only what nothing names.
        dry_run: Only tell.
        force: Also while a run seems alive.

    Raises:
        FormatError: There is no plan of packsvc.
        StateError: A run is alive.
    """
    store = Store(out, storage_options=storage_options)
    try:
        plan = Plan.loads(store.read(PLAN_NAME), where=store.describe(PLAN_NAME))
    except FileNotFoundError:
        raise FormatError(
            f"{out}: no {PLAN_NAME} here, so it is not an output of packsvc; nothing was removed"
        ) from None
    if not force:
        _refuse_alive(store)
    files = store.list()
    if everything:
        mine = [f for f in files if f.name in OWN_FILES or f.name.startswith(OWN_FOLDERS) or _TEMPORARY.search(f.name)]
        # The plan goes last: as long as it stands, an interrupted clean can be run again.
        mine.sort(key=lambda f: f.name == PLAN_NAME)
    else:
        named = _named(store, plan, files)
        mine = [
            f for f in files if (f.name.startswith(SWEPT_FOLDERS) and f.name not in named) or _TEMPORARY.search(f.name)
        ]
    if not dry_run:
        for file in mine:
            store.remove(file.name)
        if everything:
            store.remove_empty_folders()
    gone = {f.name for f in mine}
    return Cleaned(
        files=tuple(f.name for f in mine),
        size_bytes=sum(f.size_bytes for f in mine),
        kept=tuple(f.name for f in files if f.name not in gone) if everything else (),
    )


def _refuse_alive(store: Store) -> None:
    info = store.info(PROGRESS_NAME)
    if info is None:
        return
    tree: dict[str, Any] = {}
    with contextlib.suppress(ValueError, FileNotFoundError):
        tree = json.loads(store.read(PROGRESS_NAME))
    age = time.time() - float(tree.get("updated_at") or info.mtime or 0.0)
    if age < ALIVE_SECONDS and tree.get("stage") != "done":
        raise StateError(
            f"{store.url}: a run is alive ({PROGRESS_NAME} is {age:.0f} s old); wait for its end, or use --force if it "
            f"is dead"
        )


def _named(store: Store, plan: Plan, files: list[FileInfo]) -> set[str]:
    """Names of files that the plan, a commit or the manifest names."""
    named = {piece.path for group in plan.groups for piece in group if piece.path is not None}
    trees = [
        json.loads(store.read(f.name)) for f in files if f.name.startswith("commits/") and f.name.endswith(".json")
    ]
    trees = [t for t in trees if t.get("plan_id") == plan.plan_id]
    if any(f.name == MANIFEST_NAME for f in files):
        trees.append(json.loads(store.read(MANIFEST_NAME)))
    for tree in trees:
        rejects = tree.get("rejects") or []
        for entry in [
            *tree.get("shards", []),
            *(rejects if isinstance(rejects, list) else [rejects]),
            tree.get("tails"),
        ]:
            if entry:
                named.add(entry["path"])
    return named
