"""Memory: a worker needs 20 bytes a token of its group at most, a driver the same for many rows as for few."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.encode import toys
from tests.run.jobs import WORDS

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]

WORKER = """
import json, os, sys
from packsvc.config import parse_job
from packsvc.run import pack

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))

if sys.argv[3] == "made":
    # Only reading and encoding are replaced, so that 30M tokens take seconds.
    import numpy as np
    import packsvc.run.group as group
    from packsvc.types import Counts, EncodedBatch

    class Made:
        audited = 0
        def __init__(self, encoder):
            self.facts = encoder.facts
        def encode(self, examples, *, source):
            n, length = len(examples), int(sys.argv[4])
            rng = np.random.default_rng(examples[0].row)
            return EncodedBatch(
                input_ids=rng.integers(0, 30, n * length, dtype=np.int32), loss_mask=np.arange(n * length) % length > 1,
                loss_weight=None, offsets=np.arange(n + 1, dtype=np.int64) * length, file=np.zeros(n, np.int32),
                row=np.array([e.row for e in examples]), part=np.zeros(n, np.int32), split=np.zeros(n, np.int16),
                rejects=[], counts=Counts(rows=n, packed=n, encoded_tokens=n * length))

    real = group.open_encoder
    group.open_encoder = lambda job, settings: Made(real(job, settings))

small, large = (parse_job(tree, base=sys.argv[2]) for tree in json.loads(sys.argv[1]))
pack(small, workers=0)
before = status("VmRSS:")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
manifest = pack(large, workers=0)
print(json.dumps({"growth": status("VmHWM:") - before, "tokens": manifest.totals["tokens"],
                  "groups": sum(name.endswith(".json") for name in os.listdir(sys.argv[2] + "/large/commits"))}))
"""

GROUP = """
import json, sys
import packsvc.run.tasks as tasks
from packsvc.config import parse_job
from packsvc.run import pack

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))

peaks = []
real = tasks.pack_group

def pack_group(*arguments, **options):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forgets the peak
    record = real(*arguments, **options)
    peaks.append(peak())
    return record

tasks.pack_group = pack_group
totals = pack(parse_job(json.loads(sys.argv[1]), base=sys.argv[2]), workers=0).totals
[peak] = peaks
print(json.dumps({"peak": peak, "tokens": totals["tokens"], "rejected_tokens": totals["rejected_tokens"]}))
"""

DRIVER = """
import json, sys, tracemalloc
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
import packsvc.run.driver as driver
import packsvc.sources.counting as counting
from packsvc.config import parse_job
from packsvc.run.executors import Outcome

class Elsewhere:
    def __init__(self):
        self.pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    def run(self, function, tasks, *, memory_bytes=0):
        for number, task in enumerate(tasks):
            yield Outcome(task=number, value=self.pool.submit(function, *task).result())
    def close(self):
        pass

if __name__ == "__main__":
    elsewhere = Elsewhere()
    driver.make_executor = lambda **_: elsewhere
    counting.COUNT_BLOCK_BYTES = 1 << 16  # so that even the few rows are several blocks
    warm, few, many = (parse_job(tree, base=sys.argv[2]) for tree in json.loads(sys.argv[1]))
    driver.pack(warm)
    peaks = []
    for job in (few, many):
        tracemalloc.start()
        driver.pack(job)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    elsewhere.pool.shutdown()
    print(json.dumps(peaks))
"""


def run(code, tmp_path, jobs, *more):
    """What a script prints about one job or several, in a process of its own."""
    script = tmp_path / "measured.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(jobs), str(tmp_path), *map(str, more)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def write_texts(path, *, rows, words, seed=0):
    """Rows of text, of about `words` words."""
    rng = random.Random(seed)
    some = [" ".join(rng.choices(WORDS, k=rng.randint(words // 2, words * 3 // 2))) for _ in range(200)]
    with open(path, "w") as file:
        for _ in range(rows):
            file.write('{"text": "' + rng.choice(some) + '"}\n')


def write_ids(path, *, rows, seed=0):
    """Rows of about 400 ids, which take no time to encode; each tenth of ten times as many."""
    rng = random.Random(seed)
    some = [[rng.randint(5, 24) for _ in range(rng.randint(200, 600))] for _ in range(200)]
    short = [(", ".join(map(str, ids)), ", ".join("1" * len(ids))) for ids in some]
    with open(path, "w") as file:
        for row in range(rows):
            parts = rng.choices(short, k=1 if row % 10 else 10)
            ids, mask = (", ".join(part) for part in zip(*parts, strict=True))
            file.write(f'{{"input_ids": [{ids}], "loss_mask": [{mask}]}}\n')


def job(tmp_path, name, **changes):
    tokenizer = tmp_path / "toy"
    if not tokenizer.exists():
        toys.save(toys.words(vocabulary=sorted(set(WORDS))), tokenizer)
    tree = {
        "tokenizer": str(tokenizer),
        "sources": [{"path": f"{name}.jsonl", "format": "text"}],
        "output": name,
        "limits": {"max_reject_fraction": 1, "max_overlong_fraction": 1},
    }
    return {**tree, **changes}


def growth_per_token(tmp_path, *, rows, words, made=False):
    write_texts(tmp_path / "small.jsonl", rows=300, words=10 if made else 100)
    write_texts(tmp_path / "large.jsonl", rows=rows, words=10 if made else words)
    jobs = [job(tmp_path, "small"), job(tmp_path, "large")]
    found = run(WORKER, tmp_path, jobs, "made" if made else "real", words)
    assert found["groups"] == 1
    print(f"{found['growth'] / found['tokens']:.1f} bytes a token at {found['tokens']:,} tokens")
    return found["growth"] / found["tokens"]


def test_p10_p11_what_a_worker_holds_grows_by_at_most_20_bytes_a_token_of_its_group(tmp_path):
    """Resident, in a fresh process each; half of the text is in rows that are refused as overlong."""
    found = []
    for name, rows in (("few", 6_000), ("many", 20_000)):
        write_ids(tmp_path / f"{name}.jsonl", rows=rows)
        sources = [{"path": f"{name}.jsonl", "format": "pretokenized"}]
        found.append(run(GROUP, tmp_path, job(tmp_path, name, sources=sources, seq_len=2048)))
    few, many = found
    slope = (many["peak"] - few["peak"]) / (many["tokens"] - few["tokens"])
    print(f"{slope:.1f} bytes a token from {few} to {many}")
    assert many["rejected_tokens"] > many["tokens"]
    assert slope <= 20


@pytest.mark.parametrize(("rows", "length"), [(65_000, 500), (4_000, 3_000)])
def test_p11_packing_and_writing_a_large_group_needs_at_most_20_bytes_a_token(tmp_path, rows, length):
    assert growth_per_token(tmp_path, rows=rows, words=length, made=True) <= 20


def test_p11_the_memory_of_a_driver_does_not_grow_with_the_rows(tmp_path):
    """One file and eight files of the same size: what grows is the plan, by its pieces, and nothing by rows."""
    for name, files in (("warm", 1), ("few", 1), ("many", 8)):
        for n in range(files):
            write_texts(tmp_path / f"{name}-{n}.jsonl", rows=8_000, words=12, seed=n)
    packing = {"packing": {"group_examples": 8_000}}
    jobs = [
        job(tmp_path, name, sources=[{"path": f"{name}-*.jsonl", "format": "text"}], **packing)
        for name in ("warm", "few", "many")
    ]
    few, many = run(DRIVER, tmp_path, jobs)
    print(f"driver peak {few} bytes for 8,000 rows, {many} for 64,000")
    assert many - few < 4 * (64_000 - 8_000)
