"""Whole jobs on S3: inputs, plan, shards, commits, rejects and manifest there, the bytes those of a local run."""

import gzip
import io
import json
import random

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import packsvc.storage.store as store_module
from packsvc.config import parse_job
from packsvc.errors import FormatError, PacksvcError, StorageError
from packsvc.run import clean, pack
from packsvc.shards import Manifest
from packsvc.statistics import query
from packsvc.storage import Store
from packsvc.validation import validate
from tests.objectstore import ANYTIME, Fault, stored
from tests.run.jobs import conversation

pytestmark = pytest.mark.slow
TIMED = ("progress.json", "plan.json", "manifest.json")
"""Files that hold moments, etags or the place of the output; all others are the same bytes everywhere."""


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    monkeypatch.setattr(store_module, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(store_module, "LONGEST_WAIT_SECONDS", 0.05)


@pytest.fixture
def job(s3, smollm2_path):
    """A job over four inputs of three kinds in the bucket, with a row that is no JSON."""
    rng = random.Random(0)
    lines = [json.dumps(conversation(rng)).encode() + b"\n" for _ in range(90)]
    table = pa.Table.from_pylist([conversation(rng) for _ in range(40)])
    parquet = io.BytesIO()
    pq.write_table(table, parquet, row_group_size=16)
    inputs = {
        "data/a.jsonl": b"".join(lines[:40]) + b"{broken\n",
        "data/b.jsonl.gz": gzip.compress(b"".join(lines[40:70]), mtime=0),
        "data/deep/c.jsonl": b"".join(lines[70:]),
        "data/d.parquet": parquet.getvalue(),
    }
    client = boto3.client("s3", endpoint_url=s3.direct)
    for name, data in inputs.items():
        client.put_object(Bucket=s3.url.removeprefix("s3://"), Key=name, Body=data)
    return parse_job(
        {
            "name": "small",
            "tokenizer": str(smollm2_path),
            "sources": [
                {"path": f"{s3.url}/data/**/*.jsonl*", "name": "chat"},
                {"path": f"{s3.url}/data/d.parquet", "name": "columns", "weight": 0.5},
            ],
            "seq_len": 256,
            "packing": {"group_examples": 32},
            "limits": {"max_reject_fraction": 0.5},
            "splits": {"train": 0.8, "valid": 0.2},
            "output": f"{s3.url}/out",
        }
    )


def output_bytes(bucket, folder="out"):
    """What readers look at, less what differs by time and place."""
    found = {n.removeprefix(f"{folder}/"): d for n, d in stored(bucket).items() if n.startswith(f"{folder}/")}
    return {n: d for n, d in found.items() if n not in TIMED and not n.startswith("failures/")}


def local_bytes(folder):
    files = (p for p in folder.rglob("*") if p.is_file())
    found = {p.relative_to(folder).as_posix(): p.read_bytes() for p in files}
    return {name: data for name, data in found.items() if name not in TIMED}


def in_folder(job, url):
    return job.model_copy(update={"output": str(url)})


def test_a_job_on_s3_gives_the_bytes_of_a_local_run_and_is_read_back(s3, job, tmp_path):
    manifest = pack(job, workers=0)
    assert pack(in_folder(job, tmp_path / "out"), workers=0).plan_id == manifest.plan_id
    there = output_bytes(s3)
    assert there == local_bytes(tmp_path / "out")
    folders = {name.split("/")[0] for name in there}
    assert {"shards", "rejects", "commits", "packs.parquet", "lengths.parquet"} <= folders
    assert manifest.totals["rejected_by_reason"] == {"invalid_json": 1}
    assert validate(job.output).ok
    assert validate(job.output, against_sources=True).ok
    assert Manifest.load(job.output).digest == manifest.digest
    assert query(job.output, "select count(*) as n from packs").to_pylist() == [{"n": manifest.totals["packs"]}]
    s3.seen.clear()
    assert pack(job, workers=0).digest == manifest.digest
    written = {path.rpartition("/")[2] for method, path, _ in s3.seen if method == "PUT"}
    assert written <= {"progress.json"}  # all was done


def test_packs_stream_from_s3_as_from_a_folder(s3, job, tmp_path):
    torch = pytest.importorskip("torch")
    from packsvc.stream import PackStream

    pack(job, workers=0)
    pack(in_folder(job, tmp_path / "out"), workers=0)
    with PackStream(job.output, seed=3) as far, PackStream(str(tmp_path / "out"), seed=3) as near:
        pairs = list(zip(far, near, strict=True))
    assert len(pairs) == len(near) > 2
    for mine, theirs in pairs:
        assert torch.equal(mine.input_ids, theirs.input_ids)
        assert torch.equal(mine.labels, theirs.labels)
        assert torch.equal(mine.cu_seqlens, theirs.cu_seqlens)


def test_a_fifth_of_all_requests_failing_changes_nothing(s3, job):
    pack(job, workers=0)
    expected = output_bytes(s3)
    s3.seen.clear()
    s3.at_random(0.2, seed=1)
    bad = in_folder(job, f"{s3.url}/bad")
    manifest = pack(bad, workers=0)
    assert validate(bad.output).ok
    assert s3.met == set(ANYTIME)
    assert sum(fault is not None for _, _, fault in s3.seen) > 20
    s3.faults = None
    assert output_bytes(s3, "bad") == expected
    assert Manifest.load(bad.output).digest == manifest.digest


def test_storage_that_goes_away_ends_with_3_wherever_and_the_run_goes_on_later(s3, job):
    pack(job, workers=0)
    expected = output_bytes(s3)
    bad = in_folder(job, f"{s3.url}/bad")
    for part in ("plan.json", "shards/", "commits/000002", "packs.parquet", "manifest.json"):
        s3.always(Fault.INTERNAL, method="PUT", part=f"/bad/{part}")
        with pytest.raises(StorageError, match=f"{s3.url}/bad/{part}") as caught:
            pack(bad, workers=0)
        assert caught.value.exit_code == 3
        s3.faults = None
        with pytest.raises(FormatError):
            Manifest.load(bad.output)
        assert not any(name.startswith(f"bad/{part}") for name in stored(s3))
    pack(bad, workers=0)
    assert output_bytes(s3, "bad") == expected


def test_an_input_that_changed_on_s3_is_noticed_by_its_content(s3, job):
    client = boto3.client("s3", endpoint_url=s3.direct)
    name = s3.url.removeprefix("s3://")
    pack(job, workers=0)
    body = client.get_object(Bucket=name, Key="data/deep/c.jsonl")["Body"].read()
    client.put_object(Bucket=name, Key="data/deep/c.jsonl", Body=body)  # touched: newer, and the same
    pack(job, workers=0)
    client.put_object(Bucket=name, Key="data/deep/c.jsonl", Body=body.replace(b"pack", b"sack"))
    with pytest.raises(PacksvcError, match=r"data/deep/c.jsonl") as caught:
        pack(job, workers=0)
    assert caught.value.exit_code == 2


def test_cleaning_on_s3_removes_what_nothing_names(s3, job):
    pack(job, workers=0)
    expected = output_bytes(s3)
    Store(job.output).publish("shards/train-000000-000-0123456789ab.parquet", b"left behind")
    found = clean(job.output, force=True)
    assert list(found.files) == ["shards/train-000000-000-0123456789ab.parquet"]
    assert output_bytes(s3) == expected
    clean(job.output, everything=True, force=True)
    assert output_bytes(s3) == {}


@pytest.mark.ray_local
def test_workers_of_ray_write_the_same_to_s3(s3, job):
    pack(job, workers=0)
    expected = output_bytes(s3)
    s3.at_random(0.1, seed=2)
    pack(in_folder(job, f"{s3.url}/bad"), workers=2)
    s3.faults = None
    assert output_bytes(s3, "bad") == expected
    assert Fault.INTERNAL in s3.met
