"""Packed segments against a fresh encode: what only the sources can tell."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from packsvc.errors import EncodeError, SourceError
from packsvc.validation import Report, validate
from tests.validation.damage import edit_manifest, edit_named, edit_plan, edit_rows, manifest_of
from tests.validation.encoded import encoded_output

Rows = list[dict[str, Any]]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return encoded_output(tmp_path, loss_weights=True)


def sources(report: Report) -> list[str]:
    """Messages of the comparison, when nothing else failed."""
    assert {f.check for f in report.failures} == {"sources"}, [str(f) for f in report.failures]
    return [f.message for f in report.failures]


def test_a_right_output_equals_a_fresh_encode_of_every_row(out: Path) -> None:
    report = validate(out, against_sources=True)
    assert report.ok, [str(f) for f in report.failures]
    checked = next(c for c in report.checks if c.name == "sources").checked
    totals = manifest_of(out)["totals"]
    assert checked == totals["rows"]
    assert totals["rejected"] > 0
    assert totals["filtered"] > 0
    assert totals["packed"] > 50
    assert totals["segments"] > totals["packed"]


@pytest.mark.parametrize("changes", [{"overlong": "split", "seq_len": 48}, {"turns": "each"}, {"seq_len": 96}])
def test_fragments_parts_and_overlong_rows_are_compared_too(tmp_path: Path, changes: dict[str, Any]) -> None:
    out = encoded_output(tmp_path, **changes)
    report = validate(out, against_sources=True)
    assert report.ok, [str(f) for f in report.failures]
    totals = manifest_of(out)["totals"]
    assert totals["split"] or totals["segments"] > totals["packed"] or totals["rejected_by_reason"]["overlong"]


def test_a_sample_reads_so_many_rows_and_is_drawn_by_the_seed(out: Path) -> None:
    report = validate(out, against_sources=True, sample=30)
    assert report.ok, [str(f) for f in report.failures]
    checked = next(c for c in report.checks if c.name == "sources").checked
    assert 25 <= checked <= 30
    assert report.to_json() == validate(out, against_sources=True, sample=30).to_json()


def another_id(rows: Rows) -> None:
    rows[0]["input_ids"][3] += 1


def mask_moved(rows: Rows) -> None:
    row = rows[0]
    start = row["loss_mask"].index(True)
    row["loss_mask"][start], row["loss_mask"][start - 1] = False, True
    row["loss_weight"][start - 1], row["loss_weight"][start] = row["loss_weight"][start], 0.0


def another_weight(rows: Rows) -> None:
    row = rows[0]
    row["loss_weight"][row["loss_mask"].index(True)] = 0.75


DAMAGE = [(another_id, "input_ids"), (mask_moved, "loss_mask"), (another_weight, "loss_weight")]


@pytest.mark.parametrize(("damage", "name"), DAMAGE, ids=[d.__name__ for d, _ in DAMAGE])
def test_the_first_token_that_differs_is_named(out: Path, damage: Callable[[Rows], None], name: str) -> None:
    path = edit_rows(out, 0, damage)
    assert validate(out).ok, "only the sources can tell"
    report = validate(out, against_sources=True)
    assert f"{name} is" in sources(report)[0]
    assert "must be" in report.failures[0].message
    failure = report.failures[0]
    assert (failure.shard, failure.pack, failure.segment, failure.row_group) == (path, 0, 0, 0)


def test_origins_that_were_exchanged_are_found(out: Path) -> None:
    def change(rows: Rows) -> None:
        (a, i), (b, j) = [(r, r["segment_file"].index(2)) for r in rows if 2 in r["segment_file"]][:2]
        for name in ("segment_row", "segment_part"):
            a[name][i], b[name][j] = b[name][j], a[name][i]

    edit_rows(out, 0, change)
    assert validate(out).ok, "only the sources can tell"
    assert len(sources(validate(out, against_sources=True))) == 2


def test_a_row_that_stands_in_the_wrong_split_is_found(tmp_path: Path) -> None:
    out = encoded_output(tmp_path, splits={"train": 1.0})

    def rename(tree: dict[str, Any]) -> None:
        tree["config"]["splits"] = {"train": 0.5, "valid": 0.5}
        empty = dict.fromkeys(tree["splits"]["train"], 0)
        tree["splits"]["valid"] = {**empty, "efficiency": 0.0}

    edit_manifest(out, rename)
    edit_plan(out, lambda p: p["config"].update(splits={"train": 0.5, "valid": 0.5}))
    assert "must be in valid" in sources(validate(out, against_sources=True))[0]


def test_rejects_are_judged_again(out: Path) -> None:
    def change(rows: Rows) -> None:
        one = next(r for r in rows if r["reason"] == "unknown_role")
        other = next(r for r in rows if r["reason"] == "invalid_json")
        one["reason"], other["reason"] = other["reason"], one["reason"]

    edit_named(out, lambda m: m["rejects"][0], change)
    messages = sources(validate(out, against_sources=True))
    assert len(messages) == 2
    assert all("is rejected for" in m for m in messages)


def test_a_reject_that_was_invented_is_found(out: Path) -> None:
    def change(rows: Rows) -> None:
        rows[0]["row"] = next(n for n in range(30) if n not in {r["row"] for r in rows if r["file"] == rows[0]["file"]})

    edit_named(out, lambda m: m["rejects"][0], change)
    messages = " ".join(f.message for f in validate(out, against_sources=True).failures if f.check == "sources")
    assert "there is no record of it" in messages
    assert "is not rejected now" in messages


def test_counts_that_only_the_encoder_knows_are_compared(out: Path) -> None:
    def change(tree: dict[str, Any]) -> None:
        for counts in (tree["totals"], tree["sources"]["chat"]):
            counts["edge_tokens"] += 1
            counts["reasoning_dropped"] += 1

    edit_manifest(out, change)
    assert validate(out).ok
    messages = sources(validate(out, against_sources=True))
    assert any("edge_tokens" in m for m in messages)
    assert any("reasoning_dropped" in m for m in messages)


def test_an_input_that_is_gone_or_changed_is_a_source_error(out: Path) -> None:
    file = out.parent / "data/chat-0.jsonl"
    data = file.read_bytes()
    file.write_bytes(data[:-5])
    with pytest.raises(SourceError, match="it changed"):
        validate(out, against_sources=True)
    file.write_bytes(data[:-5] + b"xxxx\n")
    with pytest.raises(SourceError, match="content changed"):
        validate(out, against_sources=True)
    file.unlink()
    with pytest.raises(SourceError, match="is gone"):
        validate(out, against_sources=True, sample=5)


def test_an_input_that_was_only_touched_is_the_same(out: Path) -> None:
    os.utime(out.parent / "data/chat-0.jsonl", (1, 1))
    assert validate(out, against_sources=True, sample=5).ok


def test_another_tokenizer_than_the_one_that_packed_is_refused(out: Path) -> None:
    edit_plan(out, lambda p: p["encoder"]["facts"].update(fingerprint="0" * 64))
    with pytest.raises(EncodeError, match="fingerprint"):
        validate(out, against_sources=True, sample=5)


def test_the_report_is_json(out: Path) -> None:
    tree = validate(out, against_sources=True, sample=5).to_json()
    assert json.loads(json.dumps(tree)) == tree
    assert (tree["against_sources"], tree["sample"]) == (True, 5)
