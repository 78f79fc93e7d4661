"""Packing again: other packs of the same segments, from the shards of a finished output, without tokenizing.

Ids, masks, origins and splits stay what they are; only who stands beside whom changes. What was rejected or cut
as overlong before cannot come back, since its tokens are not in the shards: the summary says how many rows.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from packsvc.config import PackJob, is_url, parse_job
from packsvc.errors import ConfigError, FormatError, StateError
from packsvc.run.driver import Run
from packsvc.run.pieces import Pieces
from packsvc.run.planfile import FORMAT, PLAN_NAME, Plan, identity_hash, shaping_versions
from packsvc.run.planning import GROUP_BYTES, PIECES_PER_GROUP, deal
from packsvc.run.progress import Watch
from packsvc.shards import Manifest
from packsvc.storage import Store
from packsvc.types import InputFile, Piece, PieceKind, Reason


def repack(
    out: str,
    new: str,
    *,
    seq_len: int,
    strategy: str = "ffd",
    align: int = 1,
    workers: int | None = None,
    address: str | None = None,
    watch: Watch | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Manifest:
    """Pack the segments of `out` again into `new`; resumes what an earlier call left.

    Args:
        out: A finished output.
        new: Folder or URL of the new one.
        seq_len: Tokens of the new packs; at least the longest segment.
        strategy: ffd, first_fit_random or next_fit.
        align: Reserve room to pad every segment to a multiple of this.
        workers: As for `pack`.
        address: As for `pack`.

    Raises:
        ConfigError: A segment is longer than `seq_len`: packing again never cuts.
        FormatError: `out` is not a finished output.
        StateError: `new` holds something else.
    """
    store = Store(_absolute(out), storage_options=storage_options)
    manifest = Manifest.load(store)
    longest = -(-int(manifest.totals["max_segment_tokens"]) // align) * align
    if longest > seq_len:
        raise ConfigError(
            f"{out}: its longest segment needs {longest} tokens, more than seq_len {seq_len}. Packing again never "
            f"cuts; choose seq_len {longest} or more, or pack from the sources with another `overlong`"
        )
    old = _plan_of(store)
    job = _job(manifest, old, new, seq_len=seq_len, strategy=strategy, align=align)
    plan = _make_plan(manifest, old, job, store.url)
    return _RunAgain(job, plan, manifest, store, workers, address, watch, dict(storage_options or {})).run()


def overlong_before(manifest: Manifest) -> dict[str, int]:
    """Rows that were rejected or cut as overlong when the segments were made, and so cannot come back."""
    totals = manifest.totals
    return {
        "rejected": int(totals["rejected_by_reason"].get(Reason.OVERLONG, 0)),
        "truncated": int(totals["truncated"]),
        "split": int(totals["split"]),
    }


def _absolute(url: str) -> str:
    return url if is_url(url) else os.path.abspath(url)


def _plan_of(store: Store) -> Plan:
    try:
        return Plan.loads(store.read(PLAN_NAME), where=store.describe(PLAN_NAME))
    except FileNotFoundError:
        raise FormatError(
            f"{store.describe(PLAN_NAME)}: missing, so its inputs cannot be named; pack it anew"
        ) from None


def _job(manifest: Manifest, old: Plan, new: str, *, seq_len: int, strategy: str, align: int) -> PackJob:
    packing = {**manifest.config["packing"], "strategy": strategy, "align": align}
    tree = {**manifest.config, "seq_len": seq_len, "packing": packing, "output": new}
    job = parse_job(tree, base=old.base, where="repack")
    return job.model_copy(update={"output": _absolute(new)})


def _make_plan(manifest: Manifest, old: Plan, job: PackJob, url: str) -> Plan:
    size = max(1, job.packing.group_examples // PIECES_PER_GROUP)
    pieces: list[Piece] = []
    for index, shard in enumerate(manifest.shards):
        step = max(1, size * shard.num_packs // max(1, shard.num_segments))
        for start in range(0, shard.num_packs, step):
            stop = min(start + step, shard.num_packs)
            share = (stop - start) / shard.num_packs
            pieces.append(
                Piece(
                    file=index,
                    kind=PieceKind.SHARD,
                    start=start,
                    stop=stop,
                    first_row=start,
                    num_rows=round(shard.num_segments * share),
                    size_bytes=round(shard.num_tokens * share * 3.5),
                )
            )
    groups = deal(
        Pieces.of(pieces),
        sources=[shard.split for shard in manifest.shards],
        max_rows=job.packing.group_examples,
        max_bytes=GROUP_BYTES,
        seed=job.seed,
    )
    parts = {
        "format": FORMAT,
        "digest": manifest.digest,
        "seq_len": job.seq_len,
        "packing": job.packing.model_dump(mode="json"),
        "shard_size": job.shard_size,
        "compression": job.compression,
        "seed": job.seed,
    }
    files = tuple(
        InputFile(
            path=entry.path,
            url=was.url,
            source=entry.source,
            size_bytes=entry.size_bytes,
            etag=entry.etag,
            mtime=entry.mtime,
            num_rows=entry.num_rows,
            num_lines=was.num_lines,
            content_hash=was.content_hash,
        )
        for entry, was in zip(manifest.inputs, old.inputs, strict=True)
    )
    return Plan(
        plan_id=identity_hash(parts),
        config=job.dump(),
        base=old.base,
        inputs=files,
        groups=groups,
        readings=old.readings,
        encoder=old.encoder,
        versions=shaping_versions(),
        limit=old.limit,
        repacked={
            "url": url,
            "plan_id": manifest.plan_id,
            "digest": manifest.digest,
            "seq_len": (old.repacked or {}).get("seq_len", manifest.seq_len),
            "align": (old.repacked or {}).get("align", manifest.align),
            "overlong_before": overlong_before(manifest),
            "sources": manifest.sources,
            "rejects": [entry.to_json() for entry in manifest.rejects],
        },
    )


class _RunAgain(Run):
    """A run whose plan is given and whose groups are packs of another output."""

    def __init__(
        self,
        job: PackJob,
        plan: Plan,
        manifest: Manifest,
        source: Store,
        workers: int | None,
        address: str | None,
        watch: Watch | None,
        storage_options: dict[str, Any],
    ) -> None:
        super().__init__(job, workers, address, None, watch, storage_options)
        self.plan = plan
        self.old = manifest
        self.source = source

    def make_plan(self) -> Plan:
        """Put the plan, or find that the one there is the same."""
        if not self.store.put_if_absent(PLAN_NAME, self.plan.dumps()):
            found = Plan.loads(self.store.read(PLAN_NAME), where=self.store.describe(PLAN_NAME))
            if found.plan_id != self.plan.plan_id or found.versions != self.plan.versions:
                raise StateError(
                    f"{self.store.url}: holds another output (plan {found.plan_id[:12]}, not "
                    f"{self.plan.plan_id[:12]}); choose another folder"
                )
        for entry in self.old.rejects:
            if self.store.info(entry.path) is None:
                self.store.publish(entry.path, self.source.read(entry.path))
        before = overlong_before(self.old)
        if any(before.values()):
            self.reporter.warn(
                f"{before['rejected']} rows were rejected as overlong and {before['truncated'] + before['split']} cut "
                f"when {self.source.url} was packed with seq_len {self.old.seq_len}; they cannot come back from its "
                f"shards"
            )
        return self.plan
