"""On Ray: the same bytes whatever the number of workers, the order, or who is killed when."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from packsvc.run import pack
from tests.encode import toys
from tests.run.jobs import WORDS, shard_bytes, small_job, write_rows

pytestmark = [pytest.mark.ray_local, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return Path(toys.save(toys.words(vocabulary=sorted(set(WORDS))), tmp_path_factory.mktemp("toy")))


@pytest.fixture
def job(tmp_path, toy):
    write_rows(tmp_path / "data" / "a.jsonl", 200)
    write_rows(tmp_path / "data" / "b.jsonl", 100, seed=1)
    return small_job(tmp_path, toy)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_bytes_do_not_depend_on_the_number_of_workers(job, tmp_path, workers):
    pack(job.model_copy(update={"output": "here"}), workers=0)
    pack(job, workers=workers)
    here, there = shard_bytes(tmp_path / "here"), shard_bytes(tmp_path / "out")
    assert here == there
    assert sum(name.startswith("commits/") for name in here) >= 8


DRIVER = """
import sys
from packsvc.run import pack
from packsvc.config import parse_job
import json
tree, base, workers = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])
pack(parse_job(tree, base=base), workers=workers)
"""


def start(job, tmp_path, workers):
    import json

    argv = [sys.executable, "-c", DRIVER, json.dumps(job.dump()), str(tmp_path), str(workers)]
    return subprocess.Popen(
        argv, cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def commits(tmp_path):
    folder = tmp_path / "out" / "commits"
    return len(list(folder.glob("*.json"))) if folder.exists() else 0


def test_a_driver_killed_at_any_moment_resumes_on_another_cluster_size(job, tmp_path):
    pack(job.model_copy(update={"output": "here"}), workers=0)
    driver = start(job, tmp_path, 2)
    deadline = time.time() + 120
    while commits(tmp_path) < 2 and time.time() < deadline:
        time.sleep(0.05)
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    assert commits(tmp_path) >= 2
    assert not (tmp_path / "out" / "manifest.json").exists()
    pack(job, workers=1)
    assert shard_bytes(tmp_path / "out") == shard_bytes(tmp_path / "here")


def test_two_drivers_racing_on_one_plan_end_with_one_output(job, tmp_path):
    pack(job.model_copy(update={"output": "here"}), workers=0)
    racing = [start(job, tmp_path, 1) for _ in range(2)]
    assert [driver.wait(timeout=240) for driver in racing] == [0, 0]
    assert shard_bytes(tmp_path / "out") == shard_bytes(tmp_path / "here")
