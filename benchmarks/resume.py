"""Does a run that stops and goes on, on as many ranks or on others, see every sample once? One JSON line per case.

    python benchmarks/resume.py [--folder DIR] [--readers packsvc,mosaicml,litdata,huggingface]

2,000 samples, 4 ranks with batches of 4, two workers (threads for packsvc): 125 steps an epoch. One run goes through;
another stops after 40 steps, every rank saves its state, and is resumed in new processes on 4, 2 and 8 ranks with the
same global batch, and with another number of workers. Ranks are processes joined by gloo, as under torchrun. A line
says how many samples of the epoch were never served, how many twice, and how many of the global batches after the stop
are those of the run that went through. Each peer is read by its own loader with its own state; one that cannot be
imported is named on stderr and left out.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stream import import_mosaicml

SAMPLES, WIDTH, STOP, GLOBAL_BATCH = 2000, 32, 40, 16
PATIENCE = 300
QUICKSTART = Path(__file__).resolve().parent.parent / "pipelines" / "quickstart"
PACKAGES = {
    "packsvc": "packsvc",
    "mosaicml": "mosaicml-streaming",
    "litdata": "litdata",
    "huggingface": "datasets",
}
CASES = (("4 ranks", 4, 2), ("2 ranks", 2, 2), ("8 ranks", 8, 2), ("4 ranks, other workers", 4, 3))


def note(text: str) -> None:
    print(f"resume: {text}", file=sys.stderr, flush=True)


# --- data ------------------------------------------------------------------------------------------------------------


def write(reader: str, folder: Path) -> None:
    """The samples, each with its number, in the form of one reader."""
    folder.mkdir(parents=True)
    if reader == "packsvc":
        write_packs(folder)
    elif reader == "mosaicml":
        import_mosaicml()
        from streaming import MDSWriter

        with MDSWriter(out=str(folder), columns={"id": "int"}, size_limit=1000) as writer:
            for number in range(SAMPLES):
                writer.write({"id": number})
    elif reader == "litdata":
        from litdata.streaming.writer import BinaryWriter

        binary = BinaryWriter(str(folder), chunk_bytes=1000)
        for number in range(SAMPLES):
            binary.add_item(number, {"id": number})
        binary.done()
        binary.merge(1)
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        for part in range(16):
            rows = list(range(part * SAMPLES // 16, (part + 1) * SAMPLES // 16))
            pq.write_table(pa.table({"id": rows}), folder / f"{part:02d}.parquet", row_group_size=25)


def write_packs(folder: Path) -> None:
    """A packed output of as many packs, each full with one segment."""
    import packsvc

    rows = [{"input_ids": [n % 1000 + 1] * WIDTH, "loss_mask": [0] + [1] * (WIDTH - 1)} for n in range(SAMPLES)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    job = {
        "tokenizer": str(QUICKSTART / "tokenizers" / "qwen3"),
        "sources": [{"path": "rows.jsonl", "name": "rows", "format": "pretokenized"}],
        "seq_len": WIDTH,
        "shard_size": "8KB",
        "packing": {"group_examples": 500},
        "output": "out",
    }
    (folder / "job.yaml").write_text(json.dumps(job), encoding="utf-8")
    packsvc.pack(packsvc.load_job(folder / "job.yaml"), workers=0)


# --- one rank --------------------------------------------------------------------------------------------------------


class Packs:
    """PackStream as a loader with a state."""

    def __init__(self, folder: str, rank: int, ranks: int, workers: int) -> None:
        from packsvc import PackStream

        self._stream = PackStream(
            f"{folder}/out", rank=rank, world_size=ranks, batch_packs=GLOBAL_BATCH // ranks, seed=7, threads=workers
        )
        self.state_dict, self.load_state_dict = self._stream.state_dict, self._stream.load_state_dict

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self._stream:
            yield {"id": batch.pack_indices}


def loader(reader: str, folder: str, rank: int, ranks: int, workers: int) -> Any:
    """Batches with `id`, and `state_dict` and `load_state_dict`."""
    size = GLOBAL_BATCH // ranks
    if reader == "packsvc":
        return Packs(folder, rank, ranks, workers)
    if reader == "mosaicml":
        import_mosaicml()
        from streaming import StreamingDataLoader, StreamingDataset

        data = StreamingDataset(local=folder, shuffle=True, batch_size=size, shuffle_seed=7, num_canonical_nodes=1)
        return StreamingDataLoader(data, batch_size=size, num_workers=workers, drop_last=True)
    if reader == "litdata":
        import litdata

        data = litdata.StreamingDataset(folder, shuffle=True, seed=7, drop_last=True)
        return litdata.StreamingDataLoader(data, batch_size=size, num_workers=workers, drop_last=True)
    import datasets
    from datasets.distributed import split_dataset_by_node
    from torchdata.stateful_dataloader import StatefulDataLoader

    datasets.disable_progress_bars()
    files = sorted(str(path) for path in Path(folder).glob("*.parquet"))
    rows = datasets.load_dataset(
        "parquet", data_files=files, split="train", streaming=True, cache_dir=f"{folder}/cache"
    ).shuffle(seed=7, buffer_size=64)
    mine = split_dataset_by_node(rows, rank=rank, world_size=ranks)
    return StatefulDataLoader(mine, batch_size=size, num_workers=workers, drop_last=True)


def run_rank(task: dict[str, Any]) -> None:
    """Read to the end or to the stop; write down what was served."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, ranks = task["rank"], task["ranks"]
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    batches = loader(task["reader"], task["folder"], rank, ranks, task["workers"])
    if task["state"]:
        saved = [Path(f"{task['state']}.{number}.state") for number in (rank, 0)]
        batches.load_state_dict(torch.load(next(path for path in saved if path.exists()), weights_only=False))
    served: list[list[int]] = []
    for batch in batches:
        served.append([int(number) for number in batch["id"]])
        if len(served) == task["stop"]:
            torch.save(batches.state_dict(), f"{task['out']}.{rank}.state")
            break
    Path(f"{task['out']}.{rank}.json").write_text(json.dumps(served), encoding="utf-8")
    dist.barrier()
    os._exit(0)  # loaders with workers hang here now and then


# --- the cases -------------------------------------------------------------------------------------------------------


def run(reader: str, folder: Path, name: str, *, ranks: int, workers: int, stop: int = 0, state: str = "") -> Any:
    """Global batches in order, each a sorted list; None where a rank failed or hung."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out = folder.parent / f"{reader}-{name}"
    processes = []
    for rank in range(ranks):
        task = {
            "reader": reader, "folder": str(folder), "rank": rank, "ranks": ranks, "workers": workers, "stop": stop,
            "state": state and str(folder.parent / f"{reader}-{state}"), "out": str(out),
        }  # fmt: skip
        environment = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }  # fmt: skip
        processes.append(
            subprocess.Popen(
                [sys.executable, __file__, "--rank", json.dumps(task)],
                env=os.environ | {key: str(value) for key, value in environment.items()},
                stdout=subprocess.DEVNULL,
                stderr=open(f"{out}.{rank}.err", "wb"),  # noqa: SIM115
            )
        )
    for process in processes:
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
    try:
        served = [json.loads(Path(f"{out}.{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]
    except FileNotFoundError:
        note(f"{reader}, {name}: a rank failed: {Path(f'{out}.0.err').read_text(errors='replace')[-400:]}")
        return None
    steps = max(len(one) for one in served)
    return [sorted(n for one in served for n in (one[step] if step < len(one) else [])) for step in range(steps)]


def compare(reader: str, folder: Path) -> None:
    whole = run(reader, folder, "whole", ranks=4, workers=2)
    before = run(reader, folder, "stopped", ranks=4, workers=2, stop=STOP)
    if whole is None or before is None:
        return
    report(reader, "not stopped", [], whole, whole)
    for name, ranks, workers in CASES:
        after = run(
            reader, folder, name.replace(" ", "-").replace(",", ""), ranks=ranks, workers=workers, state="stopped"
        )
        if after is None:
            report(reader, f"resumed on {name}", before, None, whole[STOP:])
        else:
            report(reader, f"resumed on {name}", before, after, whole[STOP:])


def report(reader: str, case: str, before: list[Any], after: list[Any] | None, expected: list[Any]) -> None:
    line: dict[str, Any] = {
        "benchmark": "resume",
        "reader": reader,
        "case": case,
        "against": f"{PACKAGES[reader]} {importlib.metadata.version(PACKAGES[reader])}",
        "date": datetime.date.today().isoformat(),
    }
    if after is None:
        line["failed"] = True
    else:
        times = collections.Counter(number for batch in [*before, *after] for number in batch)
        line["never_served"] = SAMPLES - len(times)
        line["served_twice"] = sum(count > 1 for count in times.values())
        line["global_batches"] = len(expected)
        line["equal_global_batches"] = sum(a == b for a, b in zip(after, expected, strict=False))
    print(json.dumps(line), flush=True)


def importable(reader: str) -> bool:
    try:
        if reader == "mosaicml":
            import_mosaicml()
        elif reader == "huggingface":
            import datasets  # noqa: F401
            import torchdata.stateful_dataloader  # noqa: F401
        else:
            __import__(reader)
    except ImportError as error:
        note(f"{PACKAGES[reader]} cannot be imported ({error}); left out")
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", help="for data and states; default: a temporary one")
    parser.add_argument("--readers", default=",".join(PACKAGES))
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        run_rank(json.loads(options.rank))
        return
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(options.folder or temporary)
        for reader in options.readers.split(","):
            if importable(reader):
                write(reader, base / reader)
                compare(reader, base / reader)


if __name__ == "__main__":
    main()
