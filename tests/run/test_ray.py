"""On Ray: the same bytes whatever the number of workers, the order, or who is killed when.

One cluster serves the whole file: a head without CPUs, and nodes that are added and lost as the tests go on. What
is slow is starting processes, so groups are tiny and the tokenizer a toy; a task waits where a test has to kill it.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

import packsvc.run.driver as driver
from packsvc.run import pack
from tests.encode import toys
from tests.run.jobs import WORDS, shard_bytes, small_job, write_rows

pytestmark = [pytest.mark.ray_local, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
GROUPS = 6


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return Path(toys.save(toys.words(vocabulary=sorted(set(WORDS))), tmp_path_factory.mktemp("toy")))


def job_in(folder, toy):
    write_rows(folder / "data" / "a.jsonl", 200)
    write_rows(folder / "data" / "b.jsonl", 100, seed=1)
    return small_job(folder, toy, packing={"group_examples": 50})


@pytest.fixture
def job(tmp_path, toy):
    return job_in(tmp_path, toy)


@pytest.fixture(scope="module")
def expected(tmp_path_factory, toy):
    """What the job's files are when it runs undisturbed in one process, without Ray."""
    folder = tmp_path_factory.mktemp("here")
    pack(job_in(folder, toy), workers=0)
    found = shard_bytes(folder / "out")
    assert sum(name.startswith("commits/") for name in found) >= GROUPS
    return found


@pytest.fixture(scope="module")
def cluster():
    """A cluster whose head has no CPU; this process is connected to it."""
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "150")
    import ray
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    found = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=found.address, log_to_driver=False, logging_level="ERROR", runtime_env={"env_vars": ENVIRONMENT})
    yield found
    ray.shutdown()
    found.shutdown()


def grow(cluster, *, to):
    """Nodes of one CPU, until there are so many."""
    while len(cluster.worker_nodes) < to:
        cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
    cluster.wait_for_nodes()


def wait_for(condition, *, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


class Held:
    """Tasks say `group pid` when they start, and wait until the test lets them go."""

    def __init__(self, folder, monkeypatch):
        self.marks, self.gate = folder / "marks", folder / "gate"
        real = driver.group_task

        def held(where, group, limits, *, marks=str(self.marks), gate=str(self.gate)):
            with open(marks, "a") as file:
                file.write(f"{group} {os.getpid()}\n")
            while not os.path.exists(gate):
                time.sleep(0.02)
            return real(where, group, limits)

        monkeypatch.setattr(driver, "group_task", held)

    def started(self):
        if not self.marks.exists():
            return []
        return [tuple(map(int, line.split())) for line in self.marks.read_text().splitlines()]

    def let_go(self):
        self.gate.touch()


@pytest.fixture
def held(tmp_path, monkeypatch):
    return Held(tmp_path, monkeypatch)


def run_while(job, act):
    """Run the job here and `act` beside it; what `act` raises is raised."""
    failed = []

    def guarded():
        try:
            act()
        except BaseException as error:
            failed.append(error)

    beside = threading.Thread(target=guarded)
    beside.start()
    pack(job)
    beside.join()
    if failed:
        raise failed[0]


def written(out):
    """What is there less temporary files, which a worker that is killed leaves and no reader looks at."""
    return {name: data for name, data in shard_bytes(out).items() if not name.endswith(".tmp")}


def test_p9_one_two_and_four_workers_make_the_same_bytes_and_leave_the_object_store_empty(
    cluster, job, tmp_path, expected
):
    import ray

    used = []

    def look(event):
        free = ray.available_resources().get("object_store_memory", 0)
        used.append(ray.cluster_resources()["object_store_memory"] - free)

    for nodes in (1, 2, 4):
        grow(cluster, to=nodes)
        assert ray.cluster_resources()["CPU"] == nodes
        pack(job.model_copy(update={"output": f"out-{nodes}"}), watch=look)
        assert shard_bytes(tmp_path / f"out-{nodes}") == expected, nodes
    assert len(used) > 3 * GROUPS
    assert max(used) < 10e6


def test_a_worker_killed_at_work_costs_its_group_alone(cluster, job, tmp_path, expected, held):
    grow(cluster, to=2)

    def kill_one():
        wait_for(lambda: len(held.started()) >= 2)
        os.kill(held.started()[-1][1], signal.SIGKILL)
        held.let_go()

    run_while(job, kill_one)
    assert written(tmp_path / "out") == expected
    groups = [group for group, _ in held.started()]
    assert len(groups) == len(set(groups)) + 1
    assert not (tmp_path / "out" / "failures").exists()


def workers_of(node):
    """Processes of a node's workers."""
    raylet = node.all_processes["raylet"][0].process.pid
    return {child.pid for child in psutil.Process(raylet).children(recursive=True)}


def test_a_node_lost_without_warning_changes_nothing(cluster, job, tmp_path, expected, held):
    grow(cluster, to=2)
    before = len(cluster.worker_nodes)

    def at_work():
        """A node on which a group has begun."""
        pids = {pid for _, pid in held.started()}
        return next((node for node in cluster.worker_nodes if pids & workers_of(node)), None)

    def lose_one():
        wait_for(at_work)
        node = at_work()
        orphans = workers_of(node)  # they outlive their raylet a little, and would still finish their groups
        cluster.remove_node(node, allow_graceful=False)
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        held.let_go()

    run_while(job, lose_one)
    assert len(cluster.worker_nodes) == before - 1
    assert written(tmp_path / "out") == expected
    groups = [group for group, _ in held.started()]
    assert len(groups) > len(set(groups))


DRIVER = """
import json, os, sys, time
import packsvc.run.driver as driver
from packsvc.config import parse_job
tree, base, address, most = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
real = driver.group_task

def so_many(where, group, limits):
    while group >= most:
        time.sleep(1)
    return real(where, group, limits)

driver.group_task = so_many
driver.pack(parse_job(tree, base=base), **({"address": address} if address else {"workers": 0}))
"""


def start(job, folder, *, address="", most=GROUPS):
    """A driver in a process of its own, which never gets beyond `most` groups; its words go to a file."""
    argv = [sys.executable, "-c", DRIVER, json.dumps(job.dump()), str(folder), address, str(most)]
    with open(folder / "driver.log", "ab") as log:
        return subprocess.Popen(argv, cwd=folder, env={**os.environ, **ENVIRONMENT}, stdout=log, stderr=log)


def commits(out):
    return len(list((out / "commits").glob("*.json")))


def test_a_driver_killed_in_the_middle_resumes_on_another_cluster_size(cluster, job, tmp_path, expected):
    """The next driver starts at once, while workers of the first may still be there."""
    out = tmp_path / "out"
    grow(cluster, to=2)
    first = start(job, tmp_path, address=cluster.address, most=2)
    wait_for(lambda: first.poll() is not None or commits(out) == 2)
    first.kill()
    assert first.wait() == -signal.SIGKILL, (tmp_path / "driver.log").read_text()[-2000:]
    assert not (out / "manifest.json").exists()
    cluster.remove_node(next(iter(cluster.worker_nodes)))
    pack(job)
    assert written(out) == expected


def test_two_drivers_racing_on_one_plan_end_with_one_output(cluster, job, tmp_path, expected):
    """One on the cluster, one in a process of its own."""
    grow(cluster, to=1)
    beside = start(job, tmp_path)
    try:
        pack(job)
        assert beside.wait(timeout=300) == 0, (tmp_path / "driver.log").read_text()[-2000:]
    finally:
        beside.kill()
    assert written(tmp_path / "out") == expected
    assert not list((tmp_path / "out").rglob("*.tmp"))
