"""Failures of other tools that concern a run, each under its case's name; the rest of them is beside what it tests.

P9 is in test_ray.py, more of I3 in test_kills.py, P10 and P11 are in test_memory.py.
"""

import ast
import dataclasses
import os
import random
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import packsvc.run.driver as driver
from packsvc.errors import FormatError, PacksvcError
from packsvc.run import pack
from packsvc.run.executors import WINDOW_PER_CPU, InProcess, OnRay
from packsvc.shards import Manifest
from packsvc.storage import Store
from tests.encode import toys
from tests.run.jobs import WORDS, shard_bytes, small_job, write_rows

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return Path(toys.save(toys.words(vocabulary=sorted(set(WORDS))), tmp_path_factory.mktemp("toy")))


class FakeRay:
    """As much of Ray as an executor calls; tasks end one at a time, in an order of their own."""

    def __init__(self, cpus):
        self.cpus, self.flying, self.most, self.started = cpus, [], 0, []

    def cluster_resources(self):
        return {"CPU": self.cpus}

    def nodes(self):
        return []

    def remote(self, function):
        return self

    def options(self, **options):
        assert options["scheduling_strategy"] == "SPREAD"
        assert options["max_retries"] > 0
        self._remote = self
        outer = self

        class Bound:
            def remote(self, function, task):
                reference = (len(outer.started), function, task)
                outer.started.append(reference)
                outer.flying.append(reference)
                outer.most = max(outer.most, len(outer.flying))
                return reference

        return Bound()

    def wait(self, references, *, num_returns, timeout):
        return [self.flying.pop(len(self.flying) // 2)], []

    def get(self, reference):
        _, function, task = reference
        return function(*task), None, "", "node"

    class exceptions:
        WorkerCrashedError = NodeDiedError = OutOfMemoryError = ObjectLostError = RayError = KeyError


@given(st.integers(1, 8), st.integers(0, 100))
def test_i5_a_bounded_number_of_tasks_is_in_flight_whatever_the_job(cpus, tasks):
    executor = OnRay.__new__(OnRay)
    executor._ray, executor._say, executor._mine = FakeRay(cpus), print, False
    outcomes = list(executor.run(lambda n: n * n, [(n,) for n in range(tasks)]))
    assert executor._ray.most <= max(2, WINDOW_PER_CPU * cpus)
    assert sorted((o.task, o.value) for o in outcomes) == [(n, n * n) for n in range(tasks)]


def test_p7_no_worker_leaves_a_short_last_pack_of_its_own(toy, tmp_path):
    """Eight groups end with about as many under-filled packs as one: the last round packs what they left."""
    write_rows(tmp_path / "data" / "a.jsonl", 1600)
    short, packs = {}, {}
    for groups in (1, 8):
        job = small_job(
            tmp_path, toy, packing={"group_examples": 1600 // groups}, output=f"out-{groups}", audit_fraction=0
        )
        manifest = pack(job, workers=0)
        fills = pq.read_table(tmp_path / f"out-{groups}" / "packs.parquet")["efficiency"].to_numpy()
        short[groups], packs[groups] = int((fills < 0.9).sum()), len(fills)
        assert manifest.totals["segments"] == 1600
    assert len(list((tmp_path / "out-8" / "commits").iterdir())) >= 8
    assert short[8] <= short[1] + 2, short
    assert packs[8] <= packs[1] + 1, packs


def test_p8_packing_knows_no_collective_and_no_gpu():
    """It runs off the training job: no room on its path imports torch or anything that speaks to other ranks."""
    looked_at = 0
    for room in ("config", "storage", "sources", "encode", "plan", "assemble", "shards", "run"):
        for path in sorted((ROOT / "packsvc" / room).rglob("*.py")):
            looked_at += 1
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert not {n.split(".")[0] for n in names} & {"torch", "accelerate", "deepspeed", "mpi4py"}, path
    assert looked_at > 60


def test_p14_steps_come_from_the_manifest_and_too_few_packs_are_refused_or_filled(toy, tmp_path):
    """Three short rows are one pack; eight ranks want eight."""
    stream = pytest.importorskip("packsvc.stream")
    write_rows(tmp_path / "data" / "a.jsonl", 3)
    manifest = pack(small_job(tmp_path, toy, seq_len=4096), workers=0)
    assert manifest.totals["packs"] == 1
    out = str(tmp_path / "out")
    with pytest.raises(PacksvcError, match=r"1 pack.*8|8.*1 pack"):
        stream.PackStream(out, rank=0, world_size=8)
    for rank in range(8):
        with stream.PackStream(out, rank=rank, world_size=8, remainder="pad") as filled:
            assert len(filled) == len(list(filled)) == 1


def test_d9_no_step_is_larger_than_the_first_where_shapes_are_static(toy, tmp_path):
    """Batches that grow fragment a GPU's memory; in the padded layout each is as large as every other."""
    stream = pytest.importorskip("packsvc.stream")
    write_rows(tmp_path / "data" / "a.jsonl", 100)
    pack(small_job(tmp_path, toy, packing={"strategy": "next_fit"}), workers=0)
    sizes = {}
    for layout in ("trimmed", "padded"):
        with stream.PackStream(str(tmp_path / "out"), batch_packs=2, layout=layout) as batches:
            sizes[layout] = [batch.input_ids.shape[-1] for batch in batches]
    assert len(set(sizes["trimmed"])) > 1
    assert set(sizes["padded"]) == {2 * 256}


def test_i4_the_order_in_which_groups_end_does_not_matter(toy, tmp_path, monkeypatch):
    class Shuffled(InProcess):
        def run(self, function, tasks, *, memory_bytes=0):
            order = list(range(len(tasks)))
            random.Random(len(tasks)).shuffle(order)
            assert order != sorted(order) or len(order) < 2
            for outcome in super().run(function, [tasks[i] for i in order]):
                yield dataclasses.replace(outcome, task=order[outcome.task])

    write_rows(tmp_path / "data" / "a.jsonl", 200)
    pack(small_job(tmp_path, toy, output="in-order"), workers=0)
    monkeypatch.setattr(driver, "make_executor", lambda **_: Shuffled())
    pack(small_job(tmp_path, toy), workers=0)
    assert shard_bytes(tmp_path / "out") == shard_bytes(tmp_path / "in-order")


@pytest.mark.parametrize("at", ["shards/", "commits/", "packs.parquet", "manifest.json"])
def test_i3_a_writer_that_dies_midway_leaves_nothing_a_reader_believes(toy, tmp_path, monkeypatch, at):
    write_rows(tmp_path / "data" / "a.jsonl", 60)
    job = small_job(tmp_path, toy)
    whole = job.model_copy(update={"output": "whole"})
    pack(whole, workers=0)

    class Killed(BaseException):
        """As good as kill -9: nothing handles it."""

    def dies(name):
        real = getattr(Store, name)

        def write(self, path, data):
            if path.startswith(at):
                os.makedirs(os.path.dirname(f"{self.root}/{path}"), exist_ok=True)
                with open(f"{self.root}/{path}.1-01234567.tmp", "wb") as file:
                    file.write(b"half" if name == "publish_file" else data[: len(data) // 2])
                raise Killed
            return real(self, path, data)

        return write

    with monkeypatch.context() as patch:
        for name in ("publish", "publish_file", "put_if_absent"):
            patch.setattr(Store, name, dies(name))
        with pytest.raises(Killed):
            pack(job, workers=0)
    out = tmp_path / "out"
    assert list(out.rglob("*.tmp"))
    with pytest.raises(FormatError, match="unfinished"):
        Manifest.load(str(out))
    assert pack(job, workers=0).totals["packed"] == 60
    left = {name: data for name, data in shard_bytes(out).items() if not name.endswith(".tmp")}
    assert left == shard_bytes(tmp_path / "whole")


def test_d3_the_order_in_which_a_node_lists_files_does_not_matter(toy, tmp_path):
    names = [f"{n}.jsonl" for n in range(6)]
    for folder, order in (("one", names), ("two", names[::-1])):
        for name in order:
            write_rows(tmp_path / folder / "data" / name, 15, seed=int(name[0]))
        pack(small_job(tmp_path / folder, toy), workers=0)
    assert shard_bytes(tmp_path / "one" / "out") == shard_bytes(tmp_path / "two" / "out")


@settings(max_examples=8)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(any),
    st.sampled_from([7, 20, 64]),
    st.sampled_from([150, 256]),
    st.sampled_from(["ffd", "first_fit_random", "next_fit"]),
    st.integers(0, 3),
)
def test_whatever_the_files_groups_and_strategy_each_row_is_packed_once(toy, sizes, group, seq_len, strategy, seed):
    """The property behind the cases: every row once, every pack within its length, accounts that close."""
    with TemporaryDirectory() as folder:
        for n, rows in enumerate(sizes):
            write_rows(Path(folder) / "data" / f"{n}.jsonl", rows, seed=n)
        job = small_job(
            Path(folder),
            toy,
            packing={"group_examples": group, "strategy": strategy},
            seq_len=seq_len,
            seed=seed,
            limits={"max_overlong_fraction": 1},
        )
        manifest = pack(job, workers=0)
        seen = []
        for shard in manifest.shards:
            table = pq.read_table(f"{folder}/out/{shard.path}").to_pydict()
            assert max(table["num_tokens"]) <= seq_len
            for files, rows in zip(table["segment_file"], table["segment_row"], strict=True):
                seen += list(zip(files, rows, strict=True))
        assert len(seen) == len(set(seen)) == manifest.totals["packed"]
        assert np.bincount([f for f, _ in seen], minlength=len(sizes)).tolist() == sizes or manifest.totals["rejected"]
        assert manifest.totals["packed"] + manifest.totals["rejected"] == sum(sizes)
