"""How fast, how large and how even is a whole job? One JSON line per figure.

    python benchmarks/run.py [--full] [--rows N] [--repeats 3] [--keep DIR]

The corpus is made here, from the quickstart's real conversations: drawn with a seed, each of its files as often as
the others, with a few of its own words put before each first user message so that no two rows are equal. 100,000
rows, with `--full` 1,000,000. Every run of a job is a process of its own. Times of one process are processor time,
which other work on a shared machine hardly lengthens; the speed-up of two workers over one can only be elapsed
time, so it needs two free cores. What a worker holds for each token of its group is the slope of the most memory
that runs of one process had, over runs whose groups fill a row group.

TRL's own preparation (`SFTTrainer._prepare_dataset`: chat template, assistant mask, labels, best-fit packing; once
more without the mask) runs on rows of the same corpus, and is compared by processor time per row. TRL keeps its
rows as Arrow files, packsvc writes its shards: both end on disk. Left out where trl cannot be imported.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import reporting

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = ROOT / "pipelines" / "quickstart"
ROWS_PER_FILE = 50_000
GROUPS = 16
SEQ_LEN = 4096
ROW_GROUP_TOKENS = 2**21


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--full", action="store_true", help="1,000,000 rows")
    parser.add_argument("--rows", type=int, help="instead of 100,000")
    parser.add_argument("--trl-rows", type=int, default=500, help="rows of each of TRL's repeats")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--keep", help="folder for corpus and outputs; default: a temporary one")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    return parser.parse_args()


os.environ.update(RAYON_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
os.environ.setdefault("RAY_worker_niceness", "0")  # else workers stand back behind whatever else the machine does


def report(figure: str, values: Sequence[float], **line: Any) -> None:
    """See `reporting.report`."""
    reporting.report("run", figure, values, hardware=hardware(), **line)


def hardware() -> str:
    """Processor, cores, memory, and how busy they were."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{reporting.processor()}, {os.cpu_count()} cores, {memory:.0f} GiB, load average {os.getloadavg()[0]:.1f}"


def note(text: str) -> None:
    print(f"run: {text}", file=sys.stderr, flush=True)


# ---- the corpus


def originals() -> list[list[dict[str, Any]]]:
    """The quickstart's conversations, as messages and tools, by file."""
    from inputs import read_inputs

    from packsvc.config import load_job
    from packsvc.types import Example

    return [
        [{"messages": row.messages, "tools": row.tools} for row in rows if isinstance(row, Example) and row.messages]
        for _, rows in read_inputs(load_job(QUICKSTART / "job.yaml"))
    ]


def make_corpus(folder: Path, rows: int, *, seed: int = 0) -> list[Path]:
    """Plain JSONL files of 50,000 rows; the same seed gives the same bytes."""
    found = originals()
    words = sorted({w for part in found for row in part for m in row["messages"] if isinstance(m["content"], str)
                    for w in m["content"].split()[:20] if w.isalpha()})  # fmt: skip
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for start in range(0, rows, ROWS_PER_FILE):
        paths.append(folder / f"{start // ROWS_PER_FILE:04d}.jsonl")
        with open(paths[-1], "w", encoding="utf-8") as file:
            for _ in range(start, min(start + ROWS_PER_FILE, rows)):
                row = rng.choice(rng.choice(found))
                messages = [dict(m) for m in row["messages"]]
                first = next((m for m in messages if m["role"] == "user" and isinstance(m["content"], str)), None)
                if first is not None:
                    first["content"] = " ".join(rng.choices(words, k=rng.randint(4, 12))) + ". " + first["content"]
                tools = {} if row["tools"] is None else {"tools": row["tools"]}
                file.write(json.dumps({"messages": messages, **tools}, ensure_ascii=False) + "\n")
    return paths


def head(paths: Sequence[Path], rows: int) -> Iterator[str]:
    """The first lines of the corpus."""
    for path in paths:
        with open(path, encoding="utf-8") as file:
            for line in file:
                if rows == 0:
                    return
                rows -= 1
                yield line


# ---- one run of a job, in a process of its own


def run_job(*, files: Sequence[Path], rows: int, out: Path, workers: int) -> dict[str, Any]:
    """Start this file again with `--measure` and read what it found."""
    tree = {"files": [str(f) for f in files], "rows": rows, "out": str(out), "workers": workers}
    done = subprocess.run(
        [sys.executable, __file__, "--measure", json.dumps(tree)], check=False, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"the job failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    note(f"{rows} rows, {workers} workers: {found['wall']:.1f} s elapsed, {found['cpu']:.1f} s of this process's CPU")
    return found


def measure(tree: dict[str, Any]) -> None:
    """Run a job and print what it took."""
    from packsvc.config import parse_job
    from packsvc.run import Event, pack

    workers = tree["workers"]
    job = parse_job(
        {
            "tokenizer": str(QUICKSTART / "tokenizers" / "qwen3"),
            "sources": [{"path": tree["files"], "name": "corpus", "format": "messages"}],
            "seq_len": SEQ_LEN,
            "date": "2026-01-01",
            "packing": {"group_examples": max(256, min(65536, -(-tree["rows"] // GROUPS)))},
            "limits": {"max_reject_fraction": 0.05, "max_overlong_fraction": 0.5},
            "output": tree["out"],
        },
        base=ROOT,
    )
    if workers:
        start_warm(job, workers, Path(tree["out"] + "-warm"))
    clock = Stages() if workers == 0 else None
    first: list[float] = []

    def watch(event: Event) -> None:
        if event.progress is not None and not first:
            first.append(time.monotonic())
            if workers == 0:
                Path("/proc/self/clear_refs").write_text("5")  # what the start needed does not count

    with peak_of_workers() as peaks:
        start, cpu = time.monotonic(), time.process_time()
        manifest = pack(job, workers=workers if workers == 0 else None, watch=watch)
        end, cpu = time.monotonic(), time.process_time() - cpu
    print(
        json.dumps(
            {
                "wall": end - start,
                "groups_wall": end - first[0],
                "cpu": cpu,
                "stages": clock.seconds if clock else {},
                "driver_peak": high_water(os.getpid()),
                "worker_peak": max(peaks.values(), default=0),
                "totals": manifest.totals,
                "sha": [s.sha256 for s in manifest.shards],
                "bytes": sum(s.size_bytes for s in manifest.shards),
            }
        )
    )


def start_warm(job: Any, workers: int, folder: Path) -> None:
    """Start Ray and let every worker load its libraries and the tokenizer, on rows of its own."""
    import ray

    from packsvc.run import pack

    ray.init(
        address="local",
        num_cpus=workers,
        include_dashboard=False,
        object_store_memory=80 * 2**20,
        log_to_driver=False,
        logging_level="ERROR",
    )
    first = Path(job.sources[0].paths[0])
    folder.mkdir(parents=True)
    (folder / "warm.jsonl").write_text("".join(head([first], 100 * workers)), encoding="utf-8")
    source = job.sources[0].model_copy(update={"path": str(folder / "warm.jsonl")})
    packing = job.packing.model_copy(update={"group_examples": 25})
    pack(job.model_copy(update={"sources": [source], "output": str(folder / "out"), "packing": packing}))


def high_water(pid: int) -> int:
    """Most resident memory that a process has had, in bytes; 0 when it is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


@contextlib.contextmanager
def peak_of_workers() -> Iterator[dict[int, int]]:
    """Highest memory of each Ray worker below this process, looked at twice a second."""
    peaks: dict[int, int] = {}
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.5):
            for pid in workers_below(os.getpid()):
                peaks[pid] = max(peaks.get(pid, 0), high_water(pid))

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield peaks
    finally:
        over.set()
        watcher.join()


def workers_below(ancestor: int) -> list[int]:
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                parents[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()[1])
                names[int(entry)] = Path(f"/proc/{entry}/cmdline").read_text()
    found = []
    for pid, name in names.items():
        at: int | None = pid
        while at is not None and at != ancestor:
            at = parents.get(at)
        if at == ancestor and name.startswith("ray::"):
            found.append(pid)
    return found


class Stages:
    """Processor time inside each stage of a group, less that of stages called from inside."""

    def __init__(self) -> None:
        import packsvc.run.driver as driver
        import packsvc.run.group as group
        import packsvc.run.tasks as tasks
        from packsvc.encode import BatchMerger, Encoder
        from packsvc.storage import Store

        self.seconds: dict[str, float] = {}
        self._inner = [0.0]
        named: list[tuple[Any, str, str]] = [
            (Encoder, "encode", "encode"),
            (BatchMerger, "add", "merge"),
            (group, "place", "plan"),
            (group, "assemble", "assemble"),
            (group, "write_shard", "write Parquet"),
            (Store, "publish", "publish"),
            (group, "read_example", "read"),
            (tasks, "count_input", "count"),
            (driver, "load_encoder", "load and audit the tokenizer"),
            (driver, "write_manifest", "finish"),
        ]
        for owner, name, stage in named:
            setattr(owner, name, self._timed(getattr(owner, name), stage))
        read_piece = group.read_piece
        group.read_piece = lambda *a, **k: self._rows(read_piece(*a, **k))  # type: ignore[attr-defined]

    def _timed(self, function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            start = time.process_time()
            self._inner.append(0.0)
            try:
                return function(*arguments, **options)
            finally:
                whole = time.process_time() - start
                self.seconds[stage] = self.seconds.get(stage, 0.0) + whole - self._inner.pop()
                self._inner[-1] += whole

        return call

    def _rows(self, rows: Iterator[Any]) -> Iterator[Any]:
        step, nothing = self._timed(next, "read"), object()
        while (row := step(rows, nothing)) is not nothing:
            yield row


# ---- TRL


class Trl:
    """TRL's preparation of a data set for packed training, without a model."""

    def __init__(self, *, masked: bool) -> None:
        import trl
        from transformers import AutoTokenizer
        from trl.chat_template_utils import get_training_chat_template
        from trl.trainer.sft_trainer import SFTTrainer

        self.masked = masked
        self._prepare: Any = SFTTrainer._prepare_dataset
        self._tokenizer = AutoTokenizer.from_pretrained(str(QUICKSTART / "tokenizers" / "qwen3"))
        template = None
        if masked:
            # TRL has masks for templates that it knows to the letter; the nearest to the quickstart's is this one.
            known = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
            self._tokenizer.chat_template = known.read_text(encoding="utf-8")
            template = get_training_chat_template(self._tokenizer)
        self._trainer = SimpleNamespace(
            _tokenizer=self._tokenizer, chat_template=template, completion_only_loss=False, _is_vlm=False
        )

    def seconds(self, lines: Sequence[str]) -> tuple[float, int]:
        """Processor time of the preparation, and the packs it made."""
        from datasets import Dataset
        from trl import SFTConfig

        rows = [json.loads(line) for line in lines]
        rows = [{"messages": r["messages"], "tools": json.dumps(r["tools"]) if r.get("tools") else None} for r in rows]
        with tempfile.TemporaryDirectory() as folder:
            data = Dataset.from_list(rows)
            config = SFTConfig(
                output_dir=folder,
                max_length=SEQ_LEN,
                packing=True,
                packing_strategy="bfd",
                assistant_only_loss=self.masked,
                report_to=[],
                use_cpu=True,
                bf16=False,
            )
            start = time.process_time()
            done = self._prepare(self._trainer, data, self._tokenizer, config, True, None, "train")
            return time.process_time() - start, len(done)


def usable_for_trl(lines: Sequence[str]) -> list[str]:
    """Rows with an answer in plain text: TRL stops at a row without one."""
    out = []
    for line in lines:
        messages = json.loads(line)["messages"]
        if any(m["role"] == "assistant" and m["content"] for m in messages):
            out.append(line)
    return out


class Beside:
    """TRL's time for a row, taken right after each of our runs: a machine's speed wanders from minute to minute."""

    WAYS = (
        ("speedup_over_trl", True, "assistant mask by its Qwen3 template"),
        ("speedup_over_trl_without_a_mask", False, "no mask, the tokenizer's own template"),
    )

    def __init__(self, paths: Sequence[Path], options: argparse.Namespace) -> None:
        self._lines = usable_for_trl(list(head(paths, 2 * options.trl_rows * options.repeats)))
        self._rows = options.trl_rows
        self._ways: dict[str, Trl] = {}
        self._taken: dict[str, list[float]] = {}
        for figure, masked, how in self.WAYS:
            try:
                trl = Trl(masked=masked)
                trl.seconds(self._lines[-50:])  # what is made once is not counted
                self._ways[figure] = trl
            except (ImportError, OSError, ValueError) as error:
                note(f"TRL cannot be compared with ({error}); {figure}, with {how}, is left out")

    def measure(self) -> None:
        """Once more, on rows not seen before."""
        for figure, trl in self._ways.items():
            taken = self._taken.setdefault(figure, [])
            part = self._lines[len(taken) * self._rows : (len(taken) + 1) * self._rows]
            seconds, packs = trl.seconds(part)
            note(f"{figure}: {len(part)} rows in {seconds:.1f} s of CPU, {packs} packs")
            taken.append(seconds / len(part))

    def report(self, ours_per_row: Sequence[float], rows: int) -> None:
        for figure, masked, how in self.WAYS:
            if figure in self._ways:
                report(
                    figure,
                    [theirs / ours for theirs, ours in zip(self._taken[figure], ours_per_row, strict=True)],
                    unit="ratio",
                    better="higher",
                    goal=20 if masked else None,
                    against=f"trl {importlib.metadata.version('trl')} _prepare_dataset, {how}, packing bfd, "
                    f"{self._rows} rows after each of our runs; processor time a row, our start shared by {rows} rows",
                )


# ---- the figures


def main(options: argparse.Namespace) -> None:
    rows = options.rows or (1_000_000 if options.full else 100_000)
    with contextlib.ExitStack() as stack:
        folder = Path(options.keep or stack.enter_context(tempfile.TemporaryDirectory(prefix="packsvc-run-")))
        paths = make_corpus(folder / "corpus", rows)
        small = make_corpus(folder / "corpus-tenth", max(100, rows // 10), seed=1)
        third = make_corpus(folder / "corpus-third", max(100, rows * 3 // 10), seed=2)
        note(f"{rows} rows, {sum(p.stat().st_size for p in paths) / 1e6:.0f} MB of JSONL")
        trl = Beside(paths, options)
        tenth = []
        for i in range(options.repeats):
            tenth.append(run_job(files=small, rows=rows // 10, out=folder / f"tenth-{i}", workers=0))
            trl.measure()
        between = run_job(files=third, rows=rows * 3 // 10, out=folder / "between", workers=0)
        whole = run_job(files=paths, rows=rows, out=folder / "whole", workers=0)
        speed(whole, rows)
        growth([*tenth, between, whole])
        worker_memory([*tenth, between, whole])
        start = whole["cpu"] - without_start(whole)
        trl.report([without_start(one) / one["totals"]["rows"] + start / rows for one in tenth], rows)
        on_ray(folder, paths if options.full else small, rows if options.full else rows // 10, options)


def speed(found: dict[str, Any], rows: int) -> None:
    totals, here = found["totals"], f"{rows} rows in one process, processor time"
    report("examples_per_second", [rows / found["cpu"]], unit="examples/s", better="higher", goal=None, against=here)
    report(
        "tokens_per_second",
        [totals["tokens"] / found["cpu"]],
        unit="tokens/s",
        better="higher",
        goal=None,
        against=here,
    )
    report("efficiency", [totals["efficiency"]], unit="fraction", better="higher", goal=None, against=f"{rows} rows")
    report(
        "bytes_per_token",
        [found["bytes"] / totals["tokens"]],
        unit="bytes",
        better="lower",
        goal=1.1,
        against="shards on disk, positions and origins included",
    )
    shares = {**found["stages"], "the rest": found["cpu"] - sum(found["stages"].values())}
    for stage, seconds in sorted(shares.items(), key=lambda e: -e[1]):
        name = f"share_of_time: {stage}"
        report(name, [seconds / found["cpu"]], unit="fraction", better="lower", goal=None, against=here)


def growth(found: Sequence[dict[str, Any]]) -> None:
    """By what power of the rows the time grows, without the start, which is the same for all: least squares."""
    rows = [math.log(one["totals"]["rows"]) for one in found]
    times = [math.log(without_start(one)) for one in found]
    sizes = sorted({one["totals"]["rows"] for one in found})
    ends = [t for r, t in zip(rows, times, strict=True) if r == rows[0]]
    report(
        "growth_exponent",
        [statistics.linear_regression(rows, times).slope]
        + [(times[-1] - end) / (rows[-1] - rows[0]) for end in (min(ends), max(ends))],
        unit="exponent",
        better="lower",
        goal=1.05,
        against=f"{', '.join(map(str, sizes))} rows in one process, processor time without the start",
    )


def worker_memory(found: Sequence[dict[str, Any]]) -> None:
    """By how many resident bytes a process that packs groups is larger for each token of a group: least squares."""
    sizes = [one["totals"]["tokens"] / GROUPS for one in found]
    known = [(size, one["driver_peak"]) for size, one in zip(sizes, found, strict=True) if size >= ROW_GROUP_TOKENS]
    if len({size for size, _ in known}) < 2:
        note("groups too small to tell what a token needs from what any group needs; worker_bytes_per_token left out")
        return
    ends = [peak for size, peak in known if size == known[0][0]]
    report(
        "worker_bytes_per_token",
        [statistics.linear_regression(*zip(*known, strict=True)).slope]
        + [(known[-1][1] - end) / (known[-1][0] - known[0][0]) for end in (min(ends), max(ends))],
        unit="bytes",
        better="lower",
        goal=20,
        against=f"groups of {', '.join(f'{size:.0f}' for size in sorted({s for s, _ in known}))} tokens, most resident "
        f"memory of one process; text of refused rows, {found[-1]['totals']['rejected_tokens'] / GROUPS:.0f} tokens a "
        "group, on top",
    )


def without_start(found: dict[str, Any]) -> float:
    return float(found["cpu"] - found["stages"]["load and audit the tokenizer"])


def on_ray(folder: Path, files: Sequence[Path], rows: int, options: argparse.Namespace) -> None:
    ratios, last = [], {}
    for repeat in range(options.repeats if not options.full else 1):
        found = {n: run_job(files=files, rows=rows, out=folder / f"ray-{n}-{repeat}", workers=n) for n in (1, 2)}
        if found[1]["sha"] != found[2]["sha"]:
            raise SystemExit("one and two workers gave different shards")
        ratios.append(found[1]["groups_wall"] / found[2]["groups_wall"])
        last = found[2]
    where = f"{rows} rows, {GROUPS} groups, elapsed time from the first task to the manifest, workers warm"
    report("speedup_of_two_workers", ratios, unit="ratio", better="higher", goal=1.7, against=f"one worker; {where}")
    totals = last["totals"]
    report("peak_memory_of_driver", [last["driver_peak"] / 2**20], unit="MiB", better="lower", goal=None, against=where)
    report(
        "peak_memory_of_worker",
        [last["worker_peak"] / 2**20],
        unit="MiB",
        better="lower",
        goal=None,
        against=f"{where}; libraries and tokenizer included; {totals['tokens'] // GROUPS} tokens a group",
    )


if __name__ == "__main__":
    parsed = arguments()
    if parsed.measure:
        measure(json.loads(parsed.measure))
    else:
        main(parsed)
