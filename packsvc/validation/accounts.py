"""The arithmetic of a manifest: its sums against what the shards hold, and rows and tokens in against those out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packsvc.shards import PACK_KEYS, SOURCE_KEYS, Manifest
from packsvc.validation.rejects import REASONS, RejectKeys
from packsvc.validation.report import Findings

ROW_KEYS = (
    "rows",
    "packed",
    "rejected",
    "rejected_parts",
    "filtered",
    "left_out",
    "truncated",
    "split",
    "reasoning_dropped",
    "edge_tokens",
    "turns_without_stop",
)
TOKEN_KEYS = ("encoded_tokens", "repeated_tokens", "cut_tokens", "rejected_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackSums:
    """What some packs hold, as found."""

    packs: int
    segments: int
    tokens: int
    loss_tokens: int
    sum_squared_lengths: int
    max_segments: int
    max_segment_tokens: int
    min_pack_tokens: int

    @staticmethod
    def of(counts: Sequence[NDArray[np.int64]], longest: Sequence[int]) -> PackSums:
        """From (P, 4) counts of packs (segments, tokens, loss tokens, squares) and longest segments, by shard."""
        filled = [c for c in counts if len(c)]
        sums = sum((c.sum(axis=0) for c in filled), np.zeros(4, dtype=np.int64))
        return PackSums(
            packs=sum(len(c) for c in filled),
            segments=int(sums[0]),
            tokens=int(sums[1]),
            loss_tokens=int(sums[2]),
            sum_squared_lengths=int(sums[3]),
            max_segments=max((int(c[:, 0].max()) for c in filled), default=0),
            max_segment_tokens=max(longest, default=0),
            min_pack_tokens=min((int(c[:, 1].min()) for c in filled), default=0),
        )

    def stated(self, seq_len: int) -> dict[str, Any]:
        """Under the keys of the manifest."""
        room = self.packs * seq_len
        return {
            "packs": self.packs,
            "segments": self.segments,
            "tokens": self.tokens,
            "loss_tokens": self.loss_tokens,
            "padding_tokens": room - self.tokens,
            "efficiency": self.tokens / room if room else 0.0,
            "max_segments": self.max_segments,
            "max_segment_tokens": self.max_segment_tokens,
            "min_pack_tokens": self.min_pack_tokens,
            "sum_squared_lengths": self.sum_squared_lengths,
        }


def check_pack_counts(where: str, counts: Mapping[str, Any], found: PackSums, seq_len: int, findings: Findings) -> None:
    """`totals` or one of `splits` against the packs."""
    values = found.stated(seq_len)
    findings.saw("counts", len(PACK_KEYS), "counts")
    for key in PACK_KEYS:
        findings.equal("counts", f"{where}.{key}", values[key], counts[key])


def check_sources(
    manifest: Manifest,
    per_source: NDArray[np.int64],
    packed: NDArray[np.int64],
    refused: NDArray[np.int64],
    rejects: RejectKeys,
    findings: Findings,
) -> None:
    """Each of `sources` against the packs and the reject records.

    Args:
        per_source: (sources, 5) as `ShardResult.per_source`, by sorted names.
        packed: (inputs,) distinct rows packed.
        refused: (inputs,) distinct rows rejected whole.
    """
    names = sorted(manifest.sources)
    by_input = np.array([names.index(e.source) if e.source in names else -1 for e in manifest.inputs], dtype=np.int64)
    source_of_reject = by_input[rejects.file] if len(by_input) else rejects.file
    for index, name in enumerate(names):
        counts, where = manifest.sources[name], f"sources.{name}"
        findings.saw("counts", len(SOURCE_KEYS), "counts")
        segments, tokens, loss, squares, longest = (int(v) for v in per_source[index])
        values: dict[str, Any] = {
            "segments": segments,
            "tokens": tokens,
            "loss_tokens": loss,
            "sum_squared_lengths": squares,
            "max_segment_tokens": longest,
            "packed": int(packed[by_input == index].sum()),
        }
        mine = source_of_reject == index
        if rejects.complete:
            values["rejected"] = int(refused[by_input == index].sum())
            values["rejected_parts"] = int((mine & (rejects.part >= 0)).sum())
            whole = np.bincount(rejects.reason[mine & (rejects.part < 0)], minlength=len(REASONS))
            values["rejected_by_reason"] = {r: int(n) for r, n in zip(REASONS, whole, strict=True) if n}
        for key, value in values.items():
            stated = counts[key]
            if key == "rejected_by_reason":
                stated = {reason: number for reason, number in stated.items() if number}
            findings.equal("counts", f"{where}.{key}", value, stated)
        rows = [entry.num_rows for entry in manifest.inputs if entry.source == name]
        if manifest.extra.get("limit") is None and all(r is not None for r in rows):
            findings.equal("counts", f"{where}.rows", sum(rows), counts["rows"])


def check_accounts(manifest: Manifest, findings: Findings) -> None:
    """Totals are the sums of sources, and what went in came out, in totals and for each source."""
    totals = manifest.totals
    findings.saw("accounts", 1 + len(manifest.sources), "accounts")
    for key in (*ROW_KEYS, *TOKEN_KEYS, "segments", "tokens", "loss_tokens", "sum_squared_lengths"):
        total = sum(counts[key] for counts in manifest.sources.values())
        findings.equal("accounts", f"totals.{key}, the sum over sources,", total, totals[key])
    reasons: dict[str, int] = {}
    for counts in manifest.sources.values():
        for reason, number in counts["rejected_by_reason"].items():
            reasons[reason] = reasons.get(reason, 0) + number
    findings.equal(
        "accounts", "totals.rejected_by_reason, the sum over sources,", reasons, totals["rejected_by_reason"]
    )
    for where, counts in [("totals", totals), *((f"sources.{n}", c) for n, c in manifest.sources.items())]:
        rows = counts["packed"] + counts["rejected"] + counts["filtered"] + counts["left_out"]
        findings.equal("accounts", f"{where}.rows, packed + rejected + filtered + left_out,", rows, counts["rows"])
        by_reason = sum(counts["rejected_by_reason"].values())
        findings.equal("accounts", f"{where}.rejected, the sum over reasons,", by_reason, counts["rejected"])
        made = counts["encoded_tokens"] + counts["repeated_tokens"]
        used = counts["tokens"] + counts["cut_tokens"] + counts["rejected_tokens"]
        if made != used:
            findings.fail(
                "accounts",
                f"{where}: encoded_tokens + repeated_tokens is {made}, tokens + cut_tokens + rejected_tokens is {used}",
            )
    entries = sum(entry.num_rows for entry in manifest.rejects)
    findings.equal(
        "accounts", "totals.rejected + rejected_parts", entries, totals["rejected"] + totals["rejected_parts"]
    )
    for counts_of, key in (("truncated", "packed"), ("split", "packed"), ("edge_tokens", "encoded_tokens")):
        if totals[counts_of] > totals[key]:
            findings.fail("accounts", f"totals.{counts_of} is {totals[counts_of]}, more than {key} {totals[key]}")


def check_manifest(manifest: Manifest, plan: Mapping[str, Any] | None, findings: Findings) -> None:
    """The manifest against its own config and against plan.json."""
    config = manifest.config
    findings.saw("manifest", 1, "manifests")
    packing = config.get("packing") or {}
    findings.equal("manifest", "config.seq_len", manifest.seq_len, config.get("seq_len"))
    findings.equal("manifest", "config.packing.align", manifest.align, packing.get("align"))
    findings.equal("manifest", "config.seed", manifest.seed, config.get("seed"))
    if manifest.tokenizer.pad_id >= manifest.tokenizer.vocab_size:
        findings.fail("manifest", f"pad_id {manifest.tokenizer.pad_id} is outside the vocabulary")
    named = sorted(str(source.get("name")) for source in config.get("sources", []))
    findings.equal("manifest", "the names in config.sources", sorted(manifest.sources), named)
    findings.equal("manifest", "the names in config.splits", sorted(manifest.splits), sorted(config.get("splits", {})))
    strangers = sorted({entry.source for entry in manifest.inputs} - set(manifest.sources))
    if strangers:
        findings.fail("manifest", f"inputs belong to the source {strangers[0]!r}, which sources does not list")
    placed = [(entry.source.encode(), entry.path.encode()) for entry in manifest.inputs]
    if placed != sorted(set(placed)):
        findings.fail("manifest", "inputs are not in order of source and path, or one stands twice")
    for message in manifest.disagreements():
        findings.fail("counts", message)
    paths = [e.path for e in manifest.shards] + [e.path for e in manifest.rejects]
    paths += [e.path for e in manifest.tables.values()]
    for path in sorted({path for path in paths if paths.count(path) > 1} if len(set(paths)) < len(paths) else ()):
        findings.fail("manifest", "the manifest names this file more than once", shard=path)
    if plan is None:
        findings.notes.append("there is no plan.json; the manifest was not compared with it")
        return
    findings.equal("manifest", "plan_id of plan.json", manifest.plan_id, plan.get("plan_id"))
    if plan.get("config") != config:
        findings.fail("manifest", "config differs from that of plan.json")
    planned = [[f.get("source"), f.get("path"), f.get("size_bytes")] for f in plan.get("inputs", [])]
    if planned != [[entry.source, entry.path, entry.size_bytes] for entry in manifest.inputs]:
        findings.fail("manifest", "inputs differ from those of plan.json")
