"""A job in this process: closed accounts, resume, refusals, limits, failures."""

import json
import os
import shutil

import numpy as np
import pytest

import packsvc.run.driver as driver
import packsvc.run.tasks as tasks
from packsvc.errors import ConflictError, FormatError, GroupError, LimitError, SourceError, StateError, StorageError
from packsvc.run import clean, pack
from packsvc.run.group import commit, commit_name
from packsvc.shards import Manifest
from packsvc.storage import Store
from tests.run.jobs import shard_bytes, small_job, write_rows


@pytest.fixture
def job(tmp_path, qwen3_path):
    write_rows(tmp_path / "data" / "a.jsonl", 90)
    write_rows(tmp_path / "data" / "b.jsonl", 60, seed=1)
    return small_job(tmp_path, qwen3_path)


def run(job, **more):
    return pack(job, workers=0, **more)


def test_a_job_of_several_groups_packs_every_row_and_its_accounts_close(job, tmp_path):
    manifest = run(job)
    totals = manifest.totals
    assert totals["rows"] == totals["packed"] == totals["segments"] == 150
    assert totals["encoded_tokens"] == totals["tokens"] == totals["packs"] * 256 - totals["padding_tokens"]
    assert len({name[:21] for name in os.listdir(tmp_path / "out" / "commits")}) >= 4
    assert [i.num_rows for i in manifest.inputs] == [90, 60]
    assert sum(s.num_packs for s in manifest.shards) == totals["packs"]
    assert not list((tmp_path / "out").rglob("*.tmp"))


def test_the_same_job_gives_the_same_bytes_in_another_folder(job, tmp_path):
    run(job)
    other = tmp_path / "elsewhere"
    shutil.copytree(tmp_path / "data", other / "data")
    run(job.with_base(other))
    first, second = shard_bytes(tmp_path / "out"), shard_bytes(other / "out")
    assert first == second
    assert len(first) >= 10


def test_another_seed_gives_other_packs_of_the_same_rows(job, tmp_path):
    first = run(job)
    second = run(job.model_copy(update={"seed": 5, "output": "other"}))
    assert first.plan_id != second.plan_id
    assert first.totals["tokens"] == second.totals["tokens"]
    assert {s.sha256 for s in first.shards}.isdisjoint({s.sha256 for s in second.shards})


def test_a_finished_job_started_again_does_nothing(job, tmp_path, monkeypatch):
    run(job)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*") if p.is_file()}
    monkeypatch.setattr(tasks, "pack_group", None)
    run(job)
    after = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert before == after


def test_a_run_cut_short_resumes_where_it_stood(job, tmp_path, monkeypatch):
    whole = run(job.model_copy(update={"output": "whole"}))
    real, calls = tasks.pack_group, []

    def dies_at_the_third(plan, group, store, **more):
        calls.append(group)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(plan, group, store, **more)

    monkeypatch.setattr(tasks, "pack_group", dies_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        run(job)
    assert not (tmp_path / "out" / "manifest.json").exists()
    manifest = run(job)
    assert calls[3:] == calls[2:3] + [g for g in range(max(calls) + 1) if g not in calls[:3]]
    assert [s.sha256 for s in manifest.shards] == [s.sha256 for s in whole.shards]


def test_a_shard_that_is_gone_is_made_again_with_the_same_bytes(job, tmp_path):
    manifest = run(job)
    path = tmp_path / "out" / manifest.shards[0].path
    data = path.read_bytes()
    path.unlink()
    run(job)
    assert path.read_bytes() == data


def test_a_manifest_or_a_table_that_is_gone_is_made_again_with_the_same_bytes(job, tmp_path):
    run(job)
    for name in ("manifest.json", "packs.parquet", "lengths.parquet"):
        path = tmp_path / "out" / name
        data = path.read_bytes()
        path.unlink()
        run(job)
        assert path.read_bytes() == data, name


def test_another_job_on_the_same_output_is_refused_and_told_what_differs(job, tmp_path):
    run(job)
    before = shard_bytes(tmp_path / "out")
    with pytest.raises(StateError, match=r"seed: 0 -> 3.*seq_len: 256 -> 512") as caught:
        run(job.model_copy(update={"seq_len": 512, "seed": 3}))
    assert caught.value.exit_code == 2
    assert shard_bytes(tmp_path / "out") == before


def test_an_input_that_grew_is_named(job, tmp_path):
    run(job)
    write_rows(tmp_path / "data" / "b.jsonl", 61, seed=1)
    with pytest.raises(StateError, match=r"data/b\.jsonl"):
        run(job)


def test_an_input_of_the_same_size_with_other_content_is_named(job, tmp_path):
    run(job)
    path = tmp_path / "data" / "b.jsonl"
    text = path.read_text()
    path.write_text(text.replace("mask", "mast", 1))
    os.utime(path, (1, 1))
    with pytest.raises(SourceError, match=r"data/b\.jsonl"):
        run(job)


def test_an_input_that_was_only_touched_is_not_a_changed_one(job, tmp_path):
    first = run(job)
    os.utime(tmp_path / "data" / "b.jsonl", (1, 1))
    assert run(job).digest == first.digest


def test_a_resume_under_another_library_is_refused(job, monkeypatch):
    run(job)
    real = driver.shaping_versions()
    monkeypatch.setattr(driver, "shaping_versions", lambda: {**real, "pyarrow": "1.0"})
    with pytest.raises(StateError, match="library pyarrow"):
        run(job)


def test_a_folder_with_a_foreign_manifest_is_not_touched(job, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "manifest.json").write_text("{}")
    with pytest.raises(FormatError, match="no plan"):
        run(job)
    assert os.listdir(tmp_path / "out") == ["manifest.json"]


def test_a_commit_of_other_content_stops_the_job(job, tmp_path):
    run(job)
    store = Store(str(tmp_path / "out"))
    record = json.loads(store.read(commit_name(0)))
    commit(record, store)
    with pytest.raises(ConflictError, match="group 0"):
        commit({**record, "audited": -1}, store)


def test_a_poisoned_group_is_reported_and_the_rest_goes_on(job, tmp_path, monkeypatch):
    real = tasks.pack_group

    def poisoned(plan, group, store, **more):
        if group == 1:
            raise ZeroDivisionError("poison")
        return real(plan, group, store, **more)

    monkeypatch.setattr(tasks, "pack_group", poisoned)
    with pytest.raises(GroupError, match=r"group 1.*poison"):
        run(job)
    out = tmp_path / "out"
    assert sorted(os.listdir(out / "commits")) == [
        f"{g:06d}.json" for g in range(len(os.listdir(out / "commits")) + 1) if g != 1
    ]
    failures = sorted(os.listdir(out / "failures"))
    assert failures == ["000001-1.json", "000001-2.json", "000001-3.json"]
    record = json.loads((out / "failures" / failures[0]).read_text())
    assert {"group", "attempt", "error", "traceback", "node", "splits"} <= record.keys()
    assert "ZeroDivisionError" in record["traceback"]
    assert not (out / "manifest.json").exists()
    monkeypatch.setattr(tasks, "pack_group", real)
    assert run(job).totals["packed"] == 150


def test_too_many_rejects_stop_the_job_and_are_written_down(job, tmp_path):
    with open(tmp_path / "data" / "c.jsonl", "w") as file:
        file.write("not json\n" * 30)
    with pytest.raises(LimitError, match="invalid_json") as caught:
        run(job)
    assert caught.value.exit_code == 1
    assert not (tmp_path / "out" / "manifest.json").exists()
    manifest = run(job.model_copy(update={"limits": job.limits.model_copy(update={"max_reject_fraction": 0.5})}))
    assert manifest.totals["rejected_by_reason"] == {"invalid_json": 30}
    assert manifest.totals["rows"] == 180


def test_a_job_that_packs_nothing_says_why_and_writes_no_manifest(tmp_path, qwen3_path):
    write_rows(tmp_path / "data" / "a.jsonl", 5)
    job = small_job(tmp_path, qwen3_path, sources=[{"path": "data/*.jsonl", "name": "chat", "weight": 0}])
    with pytest.raises(LimitError, match="5 left out by `weight`"):
        run(job)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_weights_repeat_rows_and_leave_rows_out(job, tmp_path):
    sources = [{"path": "data/a.jsonl", "weight": 2}, {"path": "data/b.jsonl", "weight": 0.5}]
    manifest = run(small_job(tmp_path, job.tokenizer_path, sources=sources))
    a, b = manifest.sources["a"], manifest.sources["b"]
    assert (a["packed"], a["segments"]) == (90, 180)
    assert a["repeated_tokens"] == a["encoded_tokens"] == a["tokens"] // 2
    assert 15 <= b["left_out"] <= 45
    assert b["left_out"] + b["packed"] == 60


def test_where_filters_rows_and_counts_them(tmp_path, qwen3_path):
    path = write_rows(tmp_path / "data" / "a.jsonl", 20)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**r, "lang": "de" if i % 4 == 0 else "en"}) + "\n" for i, r in enumerate(rows)))
    sources = [{"path": "data/*.jsonl", "name": "chat", "where": {"lang": "en"}}]
    totals = run(small_job(tmp_path, qwen3_path, sources=sources)).totals
    assert (totals["rows"], totals["packed"], totals["filtered"]) == (20, 15, 5)

    light = [{**sources[0], "weight": 0.5}]
    lighter = run(small_job(tmp_path, qwen3_path, sources=light, output="lighter")).totals
    assert lighter["filtered"] == 5, "every other row is filtered, whatever the weight draws"
    assert lighter["packed"] + lighter["left_out"] == 15


def test_a_trial_run_takes_some_rows_of_each_source_from_all_its_files(job, tmp_path):
    manifest = run(job, limit=20)
    assert manifest.totals["rows"] == 20
    assert not (tmp_path / "out").exists()
    table = Store(str(tmp_path / "out-limit-20"))
    assert table.info("manifest.json") is not None
    files = {int(f) for s in manifest.shards for f in read_origins(table, s)}
    assert files == {0, 1}


def read_origins(store, entry):
    import io

    import pyarrow.parquet as pq

    column = pq.read_table(io.BytesIO(store.read(entry.path))).column("segment_file")
    return np.concatenate([chunk.values.to_numpy() for chunk in column.chunks])


def test_splits_never_share_a_shard_and_add_up(job, tmp_path):
    manifest = run(small_job(tmp_path, job.tokenizer_path, splits={"train": 0.8, "valid": 0.2}))
    assert set(manifest.splits) == {"train", "valid"}
    assert sum(s["segments"] for s in manifest.splits.values()) == 150
    assert 10 <= manifest.splits["valid"]["segments"] <= 55
    assert {s.split for s in manifest.shards} == {"train", "valid"}


def test_a_full_disk_ends_the_run_so_that_it_can_be_resumed(job, tmp_path, monkeypatch):
    real = Store.publish

    def full(self, name, data):
        if name.startswith("shards/"):
            raise StorageError(f"{name}: no space left on the device")
        return real(self, name, data)

    monkeypatch.setattr(Store, "publish", full)
    with pytest.raises(StorageError) as caught:
        run(job)
    assert caught.value.exit_code == 3
    monkeypatch.setattr(Store, "publish", real)
    assert run(job).totals["packed"] == 150


def test_progress_tells_how_far_a_run_is(job, tmp_path):
    events = []
    run(job, watch=events.append)
    tree = json.loads((tmp_path / "out" / "progress.json").read_text())
    keys = {"plan_id", "started_at", "updated_at", "groups_total", "groups_done", "groups_running", "rows", "tokens"}
    assert keys | {"efficiency", "rejected_by_reason", "eta_seconds"} <= tree.keys()
    assert tree["groups_done"] == tree["groups_total"]
    assert {"message", "progress", "done"} <= {e.kind for e in events}


def test_clean_removes_what_nothing_names_and_nothing_else(job, tmp_path):
    out = tmp_path / "out"
    run(job)
    before = shard_bytes(out)
    (out / "shards" / "train-000000-000-0123456789ab.parquet").write_bytes(b"stray")
    (out / "shards" / "x.parquet.12-0123abcd.tmp").write_bytes(b"half")
    (out / "notes.txt").write_text("mine")
    assert len(clean(str(out), dry_run=True).files) == 2
    assert len(list((out / "shards").glob("*"))) > 2
    cleaned = clean(str(out))
    assert sorted(cleaned.files) == ["shards/train-000000-000-0123456789ab.parquet", "shards/x.parquet.12-0123abcd.tmp"]
    assert shard_bytes(out) == before
    assert (out / "notes.txt").exists()
    everything = clean(str(out), everything=True)
    assert everything.kept == ("notes.txt",)
    assert os.listdir(out) == ["notes.txt"]


def test_clean_refuses_a_foreign_folder_and_a_living_run(job, tmp_path):
    with pytest.raises(FormatError, match="no plan"):
        clean(str(tmp_path))
    run(job)
    path = tmp_path / "out" / "progress.json"
    tree = json.loads(path.read_text())
    path.write_text(json.dumps({**tree, "stage": "packing"}))
    with pytest.raises(StateError, match="alive"):
        clean(str(tmp_path / "out"))
    clean(str(tmp_path / "out"), force=True)
    assert Manifest.load(str(tmp_path / "out")).totals["packed"] == 150
