"""From a packed output to a verdict: every invariant of the format, in one pass over the shards.

The pass over a shard is a pure function (`shard_check`); this module runs it over all of them, adds up what they
hold in manifest order, and compares the sums with the manifest. With `against_sources` the inputs are read and
encoded again by the slow method. A finding never stops the work; only an output that cannot be judged at all
(no manifest, an unfinished run, storage that does not answer, inputs that are gone) raises.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from packsvc.errors import ConfigError
from packsvc.shards import PLAN, Manifest, ShardEntry
from packsvc.storage import Store
from packsvc.validation.accounts import PackSums, check_accounts, check_manifest, check_pack_counts, check_sources
from packsvc.validation.digests import SegmentDigests, Wanted, row_keys
from packsvc.validation.parallel import Work, run_over
from packsvc.validation.provenance import Origins, check_provenance, find_segment
from packsvc.validation.rejects import RejectKeys, read_reject_keys
from packsvc.validation.report import Findings, Report
from packsvc.validation.row_limits import row_limits
from packsvc.validation.shard_check import ShardResult, check_shard
from packsvc.validation.shard_file import ShardFacts
from packsvc.validation.tables import PackTable, check_lengths_table

if TYPE_CHECKING:
    from packsvc.validation.against_sources import Comparison


def validate(
    out: str | os.PathLike[str],
    *,
    against_sources: bool = False,
    sample: int | None = None,
    workers: int = 0,
    address: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Report:
    """Check every invariant of a packed output.

    Args:
        out: Folder or URL that a job wrote.
        against_sources: Also read the inputs again, encode them by the slow method and compare.
        sample: With `against_sources`: so many rows, drawn by the job's seed; None: all.
        workers: How many shards, and pieces of the sources, at a time: shards in threads, sources on an embedded
            Ray; 0: one after the other, in this thread.
        address: Of a Ray cluster to run both on instead.
        storage_options: For fsspec.

    Returns:
        The verdict; the same for any number of workers.

    Raises:
        ConfigError: `sample` without `against_sources`, or not positive.
        FormatError: No manifest, an unfinished or a foreign output.
        SourceError: `against_sources`, and an input is gone or changed.
        StorageError: The storage does not answer.
    """
    if sample is not None and (sample < 1 or not against_sources):
        raise ConfigError("sample is a number of rows to compare with the sources: give against_sources too")
    output = Output(Store(os.fspath(out), storage_options=storage_options))
    findings = Findings()
    check_manifest(output.manifest, output.plan, findings)
    check_accounts(output.manifest, findings)
    check_extra_files(output, findings)
    comparison = open_comparison(output, sample) if against_sources else None
    rejects = read_reject_keys(output.store, output.manifest, output.facts.row_limits, findings)
    check = partial(
        check_task, store=output.store, facts=output.facts, wanted=comparison.wanted if comparison is not None else None
    )
    results = run_over(check, output.tasks, work=Work.ARRAYS, workers=workers, address=address)
    digests = check_results(output, results, rejects, findings)
    if comparison is not None:
        comparison.run(digests, rejects, findings, workers=workers, address=address)
    return Report(
        output=output.store.url,
        plan_id=output.manifest.plan_id,
        manifest_digest=output.manifest.digest,
        against_sources=against_sources,
        sample=sample,
        num_packs=output.manifest.num_packs,
        num_tokens=int(output.manifest.totals["tokens"]),
        checks=findings.lines(),
        failures=findings.sorted_failures(),
        num_failures=sum(findings.failed.values()),
        notes=findings.notes,
    )


@dataclass(frozen=True)
class Output:
    """A packed output, opened."""

    store: Store

    @cached_property
    def manifest(self) -> Manifest:
        return Manifest.load(self.store)

    @cached_property
    def plan(self) -> dict[str, Any] | None:
        """`plan.json`; None when there is none."""
        try:
            plan = json.loads(self.store.read(PLAN))
        except (FileNotFoundError, ValueError):
            return None
        return plan if isinstance(plan, dict) else None

    @cached_property
    def source_names(self) -> list[str]:
        return sorted(self.manifest.sources)

    @cached_property
    def facts(self) -> ShardFacts:
        manifest, names = self.manifest, self.source_names
        packing = manifest.config.get("packing") or {}
        return ShardFacts(
            plan_id=manifest.plan_id,
            seq_len=manifest.seq_len,
            vocab_size=manifest.tokenizer.vocab_size,
            pad_id=manifest.tokenizer.pad_id,
            loss_weights=bool(manifest.config.get("loss_weights")),
            align=manifest.align,
            max_segments=packing.get("max_segments"),
            row_limits=row_limits(manifest.inputs),
            source_of_input=np.array(
                [names.index(e.source) if e.source in names else 0 for e in manifest.inputs], dtype=np.int64
            ),
            num_sources=len(names),
        )

    @cached_property
    def weights(self) -> NDArray[np.float64]:
        """(inputs,) weight of each input's source."""
        by_name = {s.get("name"): float(s.get("weight", 1.0)) for s in self.manifest.config.get("sources", [])}
        return np.array([by_name.get(entry.source, 1.0) for entry in self.manifest.inputs], dtype=np.float64)

    @cached_property
    def tasks(self) -> list[ShardTask]:
        return [
            ShardTask(index=index, first_pack=int(self.manifest.pack_offsets[index]), entry=entry)
            for index, entry in enumerate(self.manifest.shards)
        ]

    def place(self, shard: int, row_key: int, part: int) -> tuple[str, int | None, int | None, int | None]:
        """Path, row group, pack and number of a segment, looked up by its origin."""
        task = self.tasks[shard]
        at = find_segment(self.store, task.entry, first_pack=task.first_pack, row_key=row_key, part=part)
        return (task.entry.path, *at)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTask:
    """One shard and where its packs begin."""

    index: int
    first_pack: int
    entry: ShardEntry


def check_task(task: ShardTask, *, store: Store, facts: ShardFacts, wanted: Wanted | None) -> ShardResult:
    """Check one shard; what threads and Ray run."""
    return check_shard(store, task.entry, index=task.index, first_pack=task.first_pack, facts=facts, wanted=wanted)


def open_comparison(output: Output, sample: int | None) -> Comparison:
    """The comparison with the sources; imported here, since a plain validation needs no tokenizer."""
    from packsvc.validation.against_sources import Comparison

    return Comparison(output.store, output.manifest, output.plan, sample=sample)


def check_results(
    output: Output, results: Iterable[ShardResult], rejects: RejectKeys, findings: Findings
) -> SegmentDigests:
    """Everything that needs more than one shard: tables, counts, origins. Takes results in manifest order."""
    manifest, store = output.manifest, output.store
    table = PackTable(store, manifest, findings)
    splits = sorted(manifest.splits)
    per_source = np.zeros((len(output.source_names), 5), dtype=np.int64)
    counts: list[NDArray[np.int64]] = []
    longest: list[int] = []
    lengths: dict[tuple[str, str, int], int] = {}
    keys, parts, digests = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)], []
    for task, result in zip(output.tasks, results, strict=True):
        findings.merge([result.findings])
        table.compare(task.entry, result, first_pack=task.first_pack)
        per_source[:, :4] += result.per_source[:, :4]
        np.maximum(per_source[:, 4], result.per_source[:, 4], out=per_source[:, 4])
        counts.append(result.pack_counts)
        longest.append(int(result.per_source[:, 4].max(initial=0)))
        keys.append(row_keys(result.file, result.row))
        parts.append(result.part)
        digests += [result.digests] if result.digests is not None else []
        for source, length, number in result.lengths.tolist():
            name = output.source_names[source] if source < len(output.source_names) else "(unknown)"
            key = (task.entry.split, name, length)
            lengths[key] = lengths.get(key, 0) + number
    complete = sum(len(c) for c in counts) == manifest.num_packs
    origins = Origins(
        row_key=np.concatenate(keys),
        part=np.concatenate(parts),
        shard_offsets=np.cumsum([len(k) for k in keys]),
        split=np.array([splits.index(t.entry.split) if t.entry.split in splits else -1 for t in output.tasks]),
        complete=complete,
    )
    packed, refused = check_provenance(
        origins,
        rejects,
        weights=output.weights,
        input_names=[entry.path for entry in manifest.inputs],
        place=output.place,
        findings=findings,
    )
    if complete:
        for where, stated, chosen in [
            ("totals", manifest.totals, [True] * len(counts)),
            *((f"splits.{n}", c, [t.entry.split == n for t in output.tasks]) for n, c in manifest.splits.items()),
        ]:
            mine = [c for c, yes in zip(counts, chosen, strict=True) if yes]
            sums = PackSums.of(mine, [n for n, yes in zip(longest, chosen, strict=True) if yes])
            check_pack_counts(where, stated, sums, manifest.seq_len, findings)
        check_sources(manifest, per_source, packed, refused, rejects, findings)
        check_lengths_table(store, manifest, lengths, findings)
    else:
        findings.notes.append("some packs could not be read: sums over all packs were not compared")
    return SegmentDigests.join(digests)


def check_extra_files(output: Output, findings: Findings) -> None:
    """Parquet files beside the shards that the manifest does not name: a reader that globs would take them."""
    manifest = output.manifest
    named = {entry.path for entry in manifest.shards} | {entry.path for entry in manifest.rejects}
    for folder in ("shards", "rejects"):
        for file in output.store.list(folder):
            findings.saw("files", 1, "files")
            if file.name not in named and file.name.endswith(".parquet"):
                message = "the manifest does not name this file; `packsvc clean` removes it"
                findings.fail("files", message, shard=file.name)
