"""What the driver makes of unusual inputs: recut files, empty files among others, the last round, small groups."""

import gzip
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import packsvc.run.tasks as tasks
import packsvc.sources.counting as counting
from packsvc.encode import Encoder
from packsvc.errors import GroupError
from packsvc.run import pack
from packsvc.run.group import BATCH_ROWS
from packsvc.run.planfile import Plan
from packsvc.shards import read_rejects
from packsvc.storage import Store
from packsvc.types import Reason
from tests.encode import toys
from tests.run.jobs import WORDS, shard_bytes, small_job, write_rows


@pytest.fixture
def toy(tmp_path):
    return Path(toys.save(toys.words(vocabulary=sorted(set(WORDS))), tmp_path / "toy"))


def plan_of(out):
    return Plan.loads((out / "plan.json").read_bytes())


def origins(out, manifest):
    """(file, row) of every segment."""
    tables = [pq.read_table(out / s.path, columns=["segment_file", "segment_row"]) for s in manifest.shards]
    return sorted(
        (f, r)
        for t in tables
        for files, rows in zip(t["segment_file"].to_pylist(), t["segment_row"].to_pylist(), strict=True)
        for f, r in zip(files, rows, strict=True)
    )


def test_a_compressed_input_larger_than_a_group_is_recut_packed_and_the_pieces_go(tmp_path, toy):
    path = write_rows(tmp_path / "data" / "a.jsonl", 200)
    lines = path.read_text().splitlines()
    lines.insert(3, "")
    (tmp_path / "data" / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    path.unlink()
    job = small_job(tmp_path, toy, sources=[{"path": "data/*.gz", "name": "chat"}])
    manifest = pack(job, workers=0)
    pieces = [p for g in plan_of(tmp_path / "out").groups for p in g]
    assert {p.kind for p in pieces} == {"recut"}
    assert max(p.num_rows for p in pieces) <= 5
    assert origins(tmp_path / "out", manifest) == [(0, r) for r in range(201) if r != 3]
    assert not list((tmp_path / "out").glob("recut/*"))


def test_empty_files_do_not_decide_how_a_source_is_read(tmp_path, toy):
    for n in range(12):
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / f"{n:02d}.jsonl").write_text("")
    write_rows(tmp_path / "data" / "07.jsonl", 4)
    assert pack(small_job(tmp_path, toy), workers=0).totals["packed"] == 4


def test_small_groups_over_a_large_file_are_counted_in_one_pass(tmp_path, toy, monkeypatch):
    write_rows(tmp_path / "data" / "a.jsonl", 2000)
    scans = []
    real = counting._scan
    monkeypatch.setattr(counting, "_scan", lambda *a, **k: scans.append(1) or real(*a, **k))
    job = small_job(tmp_path, toy, packing={"group_examples": 40})
    job = job.model_copy(update={"sources": [job.sources[0].model_copy(update={"weight": 0.0})]})
    with pytest.raises(Exception, match="nothing"):
        pack(job, workers=0)
    assert len(scans) == 1
    assert max(sum(p.num_rows for p in g) for g in plan_of(tmp_path / "out").groups) <= 40


def test_the_last_round_takes_what_the_groups_sent_and_leaves_few_packs_under_filled(tmp_path, toy):
    write_rows(tmp_path / "data" / "a.jsonl", 2000)
    manifest = pack(small_job(tmp_path, toy, packing={"group_examples": 250}, seq_len=512), workers=0)
    out = tmp_path / "out"
    table = pq.read_table(out / "packs.parquet").to_pydict()
    groups = len(plan_of(out).groups)
    assert max(table["group"]) >= groups
    under = [e for e in table["efficiency"] if e < 0.9]
    assert len(under) <= 2
    assert origins(out, manifest) == [(0, r) for r in range(2000)]
    commits = [json.loads(p.read_text()) for p in sorted((out / "commits").glob("*.json"))]
    sent = sum(c["tails"]["num_segments"] for c in commits if c["tails"])
    assert 0 < sent <= 0.05 * 2000
    assert sum(s["num_segments"] for c in commits if c["kind"] == "tails" for s in c["shards"]) == sent


@pytest.fixture
def batch_sizes(monkeypatch) -> list[tuple[str, int]]:
    """Source and rows of every batch that is encoded."""
    sizes = []
    real = Encoder.encode

    def counted(self, examples, *, source):
        sizes.append((source, len(examples)))
        return real(self, examples, source=source)

    monkeypatch.setattr(Encoder, "encode", counted)
    return sizes


def test_long_rows_make_short_batches_and_the_same_bytes(tmp_path, toy, monkeypatch, batch_sizes):
    write_rows(tmp_path / "data" / "a.jsonl", 60)
    pack(small_job(tmp_path, toy, packing={"group_examples": 60}), workers=0)
    assert BATCH_ROWS > 60
    assert [size for _, size in batch_sizes] == [60]
    batch_sizes.clear()
    monkeypatch.setitem(tasks.pack_group.__globals__, "BATCH_BYTES", 2000)
    pack(small_job(tmp_path, toy, packing={"group_examples": 60}, output="short"), workers=0)
    assert sum(size for _, size in batch_sizes) == 60
    assert len(batch_sizes) > 10
    assert shard_bytes(tmp_path / "out") == shard_bytes(tmp_path / "short")


def test_rejects_stand_in_the_order_of_rows_however_they_were_found(tmp_path, toy, monkeypatch):
    """Rows that cannot be read and rows that cannot be packed, of several files and batches."""
    long = {"messages": [{"role": "user", "content": "the"}, {"role": "assistant", "content": "pack " * 300}]}
    for number in range(3):
        path = write_rows(tmp_path / "data" / f"{number}.jsonl", 12, seed=number)
        lines = path.read_text().splitlines()
        for row in range(0, 12, 2):
            lines[row] = "{" if row % 4 else json.dumps(long)
        path.write_text("\n".join([*lines, *["{"] * 7]) + "\n")
    job = {"packing": {"group_examples": 60}, "limits": {"max_reject_fraction": 1, "max_overlong_fraction": 1}}
    pack(small_job(tmp_path, toy, **job), workers=0)
    [file] = (tmp_path / "out" / "rejects").iterdir()
    found = [(r.file, r.row, r.reason) for r in read_rejects(file.read_bytes())]
    assert found == sorted(found)
    assert len(found) == 3 * (6 + 7)
    assert {reason for _, _, reason in found} == {Reason.OVERLONG, Reason.INVALID_JSON}
    monkeypatch.setitem(tasks.pack_group.__globals__, "BATCH_ROWS", 2)
    pack(small_job(tmp_path, toy, output="short", **job), workers=0)
    assert shard_bytes(tmp_path / "out") == shard_bytes(tmp_path / "short")


def test_pieces_of_a_source_are_encoded_together_and_other_sources_apart(tmp_path, toy, batch_sizes):
    sources = []
    for name in ("a", "b"):
        for number in range(3):
            write_rows(tmp_path / "data" / name / f"{number}.jsonl", 10)
        sources.append({"name": name, "path": f"data/{name}", "format": "messages", "weight": 2 if name == "b" else 1})
    manifest = pack(small_job(tmp_path, toy, sources=sources, packing={"group_examples": 60}), workers=0)
    assert sum(size for _, size in batch_sizes) == 60
    assert all(one != other for (one, _), (other, _) in pairwise(batch_sizes))
    assert manifest.totals["segments"] == 90


def test_a_failed_group_is_written_down_without_stopping_the_last_of_the_others(tmp_path, toy, monkeypatch):
    write_rows(tmp_path / "data" / "a.jsonl", 800)
    real = tasks.pack_tail_group
    job = small_job(tmp_path, toy, packing={"group_examples": 250}, seq_len=512)

    def poisoned(*args):
        raise MemoryError("poison")

    monkeypatch.setattr(tasks, "pack_tail_group", poisoned)
    with pytest.raises(GroupError, match="poison"):
        pack(job, workers=0)
    failures = sorted((tmp_path / "out" / "failures").glob("*.json"))
    assert [json.loads(p.read_text())["splits"] for p in failures] == [[], [], []]
    monkeypatch.setattr(tasks, "pack_tail_group", real)
    assert pack(job, workers=0).totals["packed"] == 800


def test_limit_spreads_over_files_and_splits_and_weights_hold_in_a_trial(tmp_path, toy):
    for n in range(3):
        write_rows(tmp_path / "data" / f"{n}.jsonl", 50, seed=n)
    sources = [{"path": "data/*.jsonl", "name": "chat", "weight": 2.0}]
    manifest = pack(small_job(tmp_path, toy, sources=sources, splits={"train": 0.5, "valid": 0.5}), workers=0, limit=30)
    out = tmp_path / "out-limit-30"
    assert manifest.totals["rows"] == 30
    assert manifest.totals["segments"] == 60
    counts = np.bincount([f for f, _ in origins(out, manifest)])
    assert counts.tolist() == [20, 20, 20]
    assert manifest.splits["valid"]["segments"] + manifest.splits["train"]["segments"] == 60
    assert min(manifest.splits[s]["segments"] for s in ("train", "valid")) > 0
    assert Store(str(tmp_path / "out")).info("plan.json") is None
