"""A process killed at any moment and started again at once: no row is lost, none twice, and the bytes are the same.

The process kills itself in the midst of a write, so that every moment that matters comes up and none is left to
chance: before a temporary file is written to its end, before it is renamed or linked, and just after.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from packsvc.errors import FormatError
from packsvc.run import pack
from packsvc.shards import Manifest
from tests.encode import toys
from tests.run.jobs import WORDS, shard_bytes, small_job, write_rows

ROOT = Path(__file__).resolve().parents[2]
ROWS = 120
STEPS = ("fsync", "replace", "link")


MASTER = """
import json, os, signal, sys
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from packsvc.config import parse_job
from packsvc.run import pack

def counted(step, kill_at, after):
    real, seen = getattr(os, step), 0
    def call(*arguments, **options):
        nonlocal seen
        seen += 1
        if seen == kill_at and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*arguments, **options)
        if seen == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(os, step, call)

for line in sys.stdin:
    tree, base, step, kill_at, after = json.loads(line)
    if (child := os.fork()) == 0:
        try:
            counted(step, kill_at, after)
            pack(parse_job(tree, base=base), workers=0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def run_until():
    """Runs a job in a process that is gone at a write of its own; forked from one that has its libraries already."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", MASTER], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as master:

        def run(job, **moment):
            tree = [job.dump(), str(job.base), moment["step"], moment["kill_at"], moment["after"]]
            print(json.dumps(tree), file=master.stdin, flush=True)
            return int(master.stdout.readline())

        yield run
        master.stdin.close()


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return Path(toys.save(toys.words(vocabulary=sorted(set(WORDS))), tmp_path_factory.mktemp("toy")))


def job_in(folder, toy):
    write_rows(folder / "data" / "a.jsonl", ROWS)
    return small_job(folder, toy, audit_fraction=0)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, toy):
    folder = tmp_path_factory.mktemp("undisturbed")
    pack(job_in(folder, toy), workers=0)
    return shard_bytes(folder / "out")


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_i3_killed_in_the_midst_of_writing_again_and_again_the_bytes_are_the_same(
    run_until, toy, tmp_path, undisturbed, step, after
):
    """Each run is killed a few writes after it began, so that the job goes on by and by until it is done."""
    job, out = job_in(tmp_path, toy), tmp_path / "out"
    kills = 0
    for kill_at in (1, 3, 7, 16):
        code = run_until(job, step=step, kill_at=kill_at, after=after)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        kills += 1
        if not (out / "manifest.json").exists():
            with pytest.raises(FormatError, match="manifest"):
                Manifest.load(str(out))
    assert kills >= 2
    manifest = pack(job, workers=0)
    assert manifest.totals["rows"] == manifest.totals["packed"] == ROWS
    assert {name: data for name, data in shard_bytes(out).items() if not name.endswith(".tmp")} == undisturbed
    named = json.loads((out / "manifest.json").read_text())["shards"]
    assert sorted(s["path"] for s in named) == sorted(n for n in undisturbed if n.startswith("shards/"))
