"""Files that are gone, cut short, flipped or too many; and outputs that cannot be judged at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from packsvc.errors import ConfigError, FormatError
from packsvc.validation import validate
from tests.validation.damage import edit_manifest, manifest_of
from tests.validation.outputs import make_output, sha


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return make_output(tmp_path, seed=2)


def test_a_missing_shard_is_a_finding(out: Path) -> None:
    path = manifest_of(out)["shards"][1]["path"]
    (out / path).unlink()
    report = validate(out)
    assert [(f.check, f.shard) for f in report.failures] == [("hashes", path)]
    assert len(report.notes) == 2


def test_a_truncated_shard_is_a_finding_and_the_others_are_still_checked(out: Path) -> None:
    shards = manifest_of(out)["shards"]
    file = out / shards[0]["path"]
    file.write_bytes(file.read_bytes()[:-100])
    report = validate(out)
    assert {f.check for f in report.failures} == {"hashes", "schema"}
    assert all(f.shard == shards[0]["path"] for f in report.failures)
    packs = next(c for c in report.checks if c.name == "geometry").checked
    assert packs == sum(s["num_packs"] for s in shards[1:])


def test_an_empty_shard_and_one_of_random_bytes_are_findings(out: Path) -> None:
    shards = manifest_of(out)["shards"]
    (out / shards[0]["path"]).write_bytes(b"")
    (out / shards[1]["path"]).write_bytes(bytes(range(256)) * 4)
    report = validate(out)
    assert {f.shard for f in report.failures} == {shards[0]["path"], shards[1]["path"]}


def test_a_flipped_bit_anywhere_in_a_shard_is_found_by_its_hash(out: Path) -> None:
    path = out / manifest_of(out)["shards"][0]["path"]
    data = path.read_bytes()
    for at in range(0, len(data), 499):
        flipped = bytearray(data)
        flipped[at] ^= 1 << (at % 8)
        path.write_bytes(bytes(flipped))
        assert "hashes" in {f.check for f in validate(out).failures}


def test_a_flipped_bit_in_a_page_is_located_by_its_checksum(out: Path) -> None:
    """Even when the manifest names the damaged file's own hash."""
    entry = manifest_of(out)["shards"][0]
    path = out / entry["path"]
    data = bytearray(path.read_bytes())
    data[120] ^= 4
    new = f"{entry['path'].rsplit('-', 1)[0]}-{sha(bytes(data))[:12]}.parquet"
    path.unlink()
    (out / new).write_bytes(bytes(data))
    edit_manifest(out, lambda m: m["shards"][0].update(path=new, sha256=sha(bytes(data))))
    failure = next(f for f in validate(out).failures if f.check == "hashes")
    assert (failure.shard, failure.row_group) == (new, 0)
    assert failure.pack is not None
    assert "input_ids" in failure.message


def test_a_parquet_file_that_the_manifest_does_not_name_is_found(out: Path) -> None:
    path = manifest_of(out)["shards"][0]["path"]
    (out / "shards/train-000009-000-0123456789ab.parquet").write_bytes((out / path).read_bytes())
    (out / "shards/train-000009-001-0123456789ab.parquet.1-ab.tmp").write_bytes(b"half")
    report = validate(out)
    assert [(f.check, f.shard) for f in report.failures] == [("files", "shards/train-000009-000-0123456789ab.parquet")]


def test_reject_files_and_tables_are_hashed_too(out: Path) -> None:
    for path in ("rejects/000000.parquet", "packs.parquet", "lengths.parquet"):
        data = (out / path).read_bytes()
        (out / path).write_bytes(data + b"x")
        assert {f.shard for f in validate(out).failures if f.check == "hashes"} == {path}
        (out / path).write_bytes(data)
    (out / "packs.parquet").unlink()
    assert [f.check for f in validate(out).failures] == ["hashes"]


def test_a_shard_named_after_other_content_is_found(out: Path) -> None:
    entry = manifest_of(out)["shards"][0]
    new = f"{entry['path'].rsplit('-', 1)[0]}-0123456789ab.parquet"
    (out / entry["path"]).rename(out / new)
    edit_manifest(out, lambda m: m["shards"][0].update(path=new))
    assert [f for f in validate(out).failures if f.check == "hashes" and "name ends in" in f.message]


def test_an_unfinished_or_foreign_output_is_refused(out: Path, tmp_path: Path) -> None:
    (out / "manifest.json").unlink()
    with pytest.raises(FormatError, match="unfinished"):
        validate(out)
    (out / "plan.json").unlink()
    with pytest.raises(FormatError, match="not a packsvc output"):
        validate(out)
    with pytest.raises(FormatError, match="no such folder"):
        validate(tmp_path / "nowhere")


def test_a_manifest_of_another_format_is_refused(out: Path) -> None:
    edit_manifest(out, lambda m: m.update(format=2))
    with pytest.raises(FormatError, match="format 2"):
        validate(out)


def test_without_a_plan_the_rest_is_checked_and_the_report_says_so(out: Path) -> None:
    (out / "plan.json").unlink()
    report = validate(out)
    assert report.ok
    assert "plan.json" in report.notes[0]
    with pytest.raises(FormatError, match=r"plan\.json"):
        validate(out, against_sources=True)


def test_a_sample_needs_sources(out: Path) -> None:
    with pytest.raises(ConfigError, match="against_sources"):
        validate(out, sample=10)


def test_the_report_is_the_same_for_any_number_of_workers(out: Path) -> None:
    shards = manifest_of(out)["shards"]
    for shard in shards[:3]:
        (out / shard["path"]).write_bytes(b"gone")
    reports = [validate(out, workers=n).to_json() for n in (0, 2, 5)]
    assert reports[0] == reports[1] == reports[2]
    assert json.loads(json.dumps(reports[0]))["ok"] is False
