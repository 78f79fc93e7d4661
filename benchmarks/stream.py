"""How fast, how lean and how soon are packs read, beside other readers? One JSON line per figure.

    python benchmarks/stream.py [--tokens 50000000 | --full] [--repeats 3] [--folder DIR]

One synthetic data set: ids by Zipf's law over 150,000, segments lognormal with median 350, 55 % of the tokens
trained, packs of 8192. It is written as an output of packsvc and in the formats of the peers, with ids, mask and
boundaries in all of them. Every reader runs in a process of its own, shuffled, over warm files, and the consumer
copies ids and mask of each batch of 4 packs into one buffer, as it would into page-locked memory. Readers take turns
within a repeat; a ratio is of one repeat, the value the median ratio, the spread its extremes. Rates leave out the
first batch, which has a figure of its own, and everything leaves out imports.

packsvc makes what a trainer needs besides (positions, labels, segment numbers, padding mask) and verifies every
checksum; the peers do neither. A peer that cannot be imported is named on stderr and its figures left out.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import reporting
from numpy.typing import NDArray

SEQ_LEN = 8192
VOCABULARY = 150_000
BATCH_PACKS = 4
GROUP_TOKENS = 8 << 20
SHARD_PACKS = 4096
RESUME_AT = (0.0, 0.37, 0.99)
WORKERS = (0, 2)
Sample = dict[str, NDArray[Any]]


# --- data ------------------------------------------------------------------------------------------------------------


def groups(num_tokens: int, seq_len: int) -> Iterator[Any]:
    """PackColumns of one row group at a time, up to about so many tokens."""
    from packsvc.assemble import assemble
    from packsvc.plan import place
    from packsvc.shards import packs_per_row_group
    from packsvc.types import Counts, EncodedBatch

    rng = np.random.default_rng(0)
    shares = np.cumsum(1 / (np.arange(VOCABULARY) + 2.7))
    shares /= shares[-1]
    made = row = 0
    while num_tokens - made >= 2 * seq_len:
        wanted = min(GROUP_TOKENS, num_tokens - made)
        lengths = np.rint(rng.lognormal(math.log(350), 0.8, max(1, wanted // 350))).astype(np.int64)
        lengths = np.clip(lengths, 8, seq_len)
        lengths = lengths[: max(1, int(np.searchsorted(np.cumsum(lengths), wanted)))]
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        total, count = int(offsets[-1]), len(lengths)
        inside = np.arange(total) - np.repeat(offsets[:-1], lengths)
        batch = EncodedBatch(
            input_ids=np.searchsorted(shares, rng.random(total)).astype(np.int32),
            loss_mask=(inside >= np.repeat(np.ceil(lengths * 0.45), lengths)) & (inside > 0),
            loss_weight=None,
            offsets=offsets,
            file=np.zeros(count, dtype=np.int32),
            row=np.arange(row, row + count, dtype=np.int64),
            part=np.zeros(count, dtype=np.int32),
            split=np.zeros(count, dtype=np.int16),
            rejects=[],
            counts=Counts(),
        )
        placement = place(lengths, seq_len)
        step = packs_per_row_group(seq_len)
        for start in range(0, placement.num_packs, step):
            stop = min(start + step, placement.num_packs)
            yield assemble(batch, placement, start=start, stop=stop, seq_len=seq_len, pad_id=0)
        made, row = made + total, row + count


class PacksvcWriter:
    """An output of packsvc, shard by shard."""

    def __init__(self, folder: Path, seq_len: int, compression: str) -> None:
        self._folder, self._seq_len, self._compression = folder, seq_len, compression
        self._plan_id = hashlib.sha256(folder.name.encode()).hexdigest()
        self._entries: list[Any] = []
        self._waiting: list[Any] = []
        (folder / "shards").mkdir(parents=True)

    def add(self, packs: Any) -> None:
        self._waiting.append(packs)
        if sum(part.num_packs for part in self._waiting) >= SHARD_PACKS:
            self._write()

    def close(self) -> None:
        from packsvc.shards import PACK_KEYS, TOTAL_KEYS, Manifest
        from packsvc.types import TokenizerFacts

        self._write()
        sums = {
            key: sum(getattr(entry, f"num_{key}") for entry in self._entries)
            for key in ("packs", "segments", "tokens", "loss_tokens")
        }
        room = sums["packs"] * self._seq_len
        packs = sums | {
            "padding_tokens": room - sums["tokens"],
            "efficiency": sums["tokens"] / room,
            "max_segments": 1,
            "max_segment_tokens": 1,
            "min_pack_tokens": 1,
            "sum_squared_lengths": 1,
        }
        rows: dict[str, Any] = {key: 0 for key in TOTAL_KEYS if key not in PACK_KEYS}
        facts = TokenizerFacts(
            id="synthetic",
            revision=None,
            fingerprint="0" * 64,
            files_sha256={},
            template_sha256="",
            vocab_size=VOCABULARY,
            pad_id=0,
            stop_ids=[],
            backend="none",
        )
        manifest = Manifest(
            name="synthetic",
            packsvc_version=importlib.metadata.version("packsvc"),
            plan_id=self._plan_id,
            seq_len=self._seq_len,
            align=1,
            seed=0,
            config={},
            versions={},
            tokenizer=facts,
            inputs=(),
            shards=tuple(self._entries),
            rejects=(),
            totals=rows | {"rejected_by_reason": {}} | packs,
            splits={"train": packs},
            sources={},
        )
        (self._folder / "manifest.json").write_text(json.dumps(manifest.to_json()))

    def _write(self) -> None:
        from packsvc.shards import ShardEntry, ShardMeta, shard_file_name, shard_name, write_shard

        parts, self._waiting = self._waiting, []
        if not parts:
            return
        name = shard_name("train", len(self._entries), 0)
        meta = ShardMeta(plan_id=self._plan_id, seq_len=self._seq_len, shard=name)
        data = write_shard(parts, meta=meta, compression=self._compression, loss_weights=False)
        digest = hashlib.sha256(data).hexdigest()
        path = shard_file_name(name, digest)
        (self._folder / path).write_bytes(data)
        self._entries.append(
            ShardEntry(
                path=path,
                split="train",
                size_bytes=len(data),
                sha256=digest,
                num_packs=sum(part.num_packs for part in parts),
                num_segments=sum(int(part.num_segments.sum()) for part in parts),
                num_tokens=sum(int(part.num_tokens.sum()) for part in parts),
                num_loss_tokens=sum(int(part.num_loss_tokens.sum()) for part in parts),
            )
        )


class SampleWriter:
    """A peer's format, one sample a pack."""

    def __init__(self, write: Callable[[Sample], None], close: Callable[[], None]) -> None:
        self._write, self.close = write, close

    def add(self, packs: Any) -> None:
        for i in range(packs.num_packs):
            bounds = packs.cu_seqlens[packs.cu_offsets[i] : packs.cu_offsets[i + 1]]
            self._write(
                {
                    "input_ids": packs.input_ids[i],
                    "loss_mask": packs.loss_mask[i].astype(np.uint8),
                    "cu_seqlens": np.ascontiguousarray(bounds),
                }
            )


def mosaicml_writer(folder: Path, seq_len: int) -> SampleWriter:
    import_mosaicml()
    from streaming import MDSWriter

    columns = {
        "input_ids": f"ndarray:int32:{seq_len}",
        "loss_mask": f"ndarray:uint8:{seq_len}",
        "cu_seqlens": "ndarray:int32",
    }
    writer = MDSWriter(out=str(folder), columns=columns, size_limit="64mb")
    return SampleWriter(writer.write, writer.finish)


def litdata_writer(folder: Path, seq_len: int) -> SampleWriter:
    from litdata.streaming.writer import BinaryWriter

    folder.mkdir()
    writer = BinaryWriter(str(folder), chunk_bytes="64MB")
    numbers = iter(range(1 << 40))

    def close() -> None:
        writer.done()
        writer.merge(1)

    return SampleWriter(lambda sample: writer.add_item(next(numbers), sample), close)


def import_mosaicml() -> None:
    """Its package imports torchvision for image data sets, which nothing here has."""
    if "torchvision" not in sys.modules and importlib.util.find_spec("torchvision") is None:
        for name in (
            "torchvision",
            "torchvision.datasets",
            "torchvision.transforms",
            "torchvision.transforms.functional",
        ):
            module: Any = types.ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            module.VisionDataset, module.to_tensor = object, None
            sys.modules[name] = module
            parent, _, last = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], last, module)
    importlib.import_module("streaming")


WRITERS: dict[str, Callable[[Path, int], Any]] = {
    "packsvc": lambda folder, seq_len: PacksvcWriter(folder, seq_len, "zstd:1"),
    "packsvc-none": lambda folder, seq_len: PacksvcWriter(folder, seq_len, "none"),
    "mosaicml": mosaicml_writer,
    "litdata": litdata_writer,
}


# --- readers, each in a process of its own ---------------------------------------------------------------------------


def read_packsvc(folder: str, workers: int) -> Iterator[Any]:
    from packsvc import PackStream

    stream = PackStream(folder, batch_packs=BATCH_PACKS, seed=1, threads=workers)
    return ((batch.input_ids, batch.labels) for batch in stream)


def joined(samples: Sequence[Sample]) -> dict[str, Any]:
    """A batch; the ragged boundaries are one tensor, the fastest way out of a worker process."""
    import torch

    parts = {key: [torch.as_tensor(np.asarray(sample[key])) for sample in samples] for key in samples[0]}
    return {key: torch.cat(part) if key == "cu_seqlens" else torch.stack(part) for key, part in parts.items()}


def read_mosaicml(folder: str, workers: int) -> Iterator[Any]:
    from streaming import StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    data = StreamingDataset(
        local=folder,
        shuffle=True,
        batch_size=BATCH_PACKS,
        shuffle_seed=1,
        num_canonical_nodes=1,
        shuffle_block_size=1 << 13,
    )
    loader = StreamingDataLoader(data, batch_size=BATCH_PACKS, num_workers=workers, collate_fn=joined)
    return ((batch["input_ids"], batch["loss_mask"]) for batch in loader)


def read_litdata(folder: str, workers: int) -> Iterator[Any]:
    from litdata import StreamingDataLoader, StreamingDataset

    data = StreamingDataset(folder, shuffle=True, seed=1)
    loader = StreamingDataLoader(data, batch_size=BATCH_PACKS, num_workers=workers, collate_fn=joined)
    return ((batch["input_ids"], batch["loss_mask"]) for batch in loader)


READERS: dict[str, Callable[[str, int], Iterator[Any]]] = {
    "packsvc": read_packsvc,
    "packsvc-none": read_packsvc,
    "mosaicml": read_mosaicml,
    "litdata": read_litdata,
}


def child(reader: str, folder: str, workers: int, seconds: float) -> None:
    """Read for some seconds at most, and print what was seen."""
    import torch

    torch.set_num_threads(1)
    if reader == "mosaicml":
        import_mosaicml()
    else:
        importlib.import_module("litdata" if reader == "litdata" else "packsvc.stream")
    buffers = [torch.empty(BATCH_PACKS * SEQ_LEN, dtype=kind) for kind in (torch.int32, torch.int32, torch.uint8)]
    count = at_first = 0
    first = 0.0
    start = time.perf_counter()
    for ids, mask in READERS[reader](folder, workers):
        if not first:
            first, at_first = time.perf_counter() - start, ids.numel()
        for values, buffer in ((ids, buffers[0]), (mask, buffers[2 if mask.dtype == torch.uint8 else 1])):
            buffer[: values.numel()].copy_(values.reshape(-1))
        count += ids.numel()
        if time.perf_counter() - start > seconds:
            break
    spent = time.perf_counter() - start
    print("RESULT", json.dumps({"rate": (count - at_first) / (spent - first), "first": first, "tokens": count}))
    sys.stdout.flush()
    os._exit(0)  # the peers' workers are not waited for


def first_batches(folder: str) -> None:
    """Seconds to the first batch of a stream opened anew, at several places of the epoch."""
    import torch

    from packsvc import PackStream

    torch.set_num_threads(1)
    with PackStream(folder, batch_packs=BATCH_PACKS, seed=1, threads=2) as stream:
        state, steps = stream.state_dict(), len(stream)
    found = []
    for place in RESUME_AT:
        start = time.perf_counter()
        with PackStream(folder, batch_packs=BATCH_PACKS, seed=1, threads=2) as stream:
            stream.load_state_dict({**state, "position": int(steps * place) * BATCH_PACKS})
            batches = iter(stream)  # held, so that what is read ahead is not waited for before the clock stops
            next(batches)
            found.append(time.perf_counter() - start)
            del batches
    print("RESULT", json.dumps(found))


# --- measuring -------------------------------------------------------------------------------------------------------


def run(arguments: Sequence[str]) -> tuple[Any, float]:
    """What a child found, and the most memory it and its own children had at a time: anonymous and shared."""
    command = [sys.executable, os.path.abspath(__file__), *arguments]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    most, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            most[0] = max(most[0], memory(process.pid))

    thread = threading.Thread(target=watch)
    thread.start()
    out, errors = process.communicate()
    over.set()
    thread.join()
    for line in out.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT ")), float(most[0])
    raise SystemExit(f"stream: {' '.join(arguments)} gave nothing:\n{errors[-2000:]}")


def memory(root: int) -> int:
    """Anonymous and shared memory of a process and all below it, in bytes."""
    total, waiting = 0, [root]
    while waiting:
        pid = waiting.pop()
        with contextlib.suppress(OSError):
            for row in Path(f"/proc/{pid}/status").read_text().splitlines():
                if row.startswith(("RssAnon", "RssShmem")):
                    total += int(row.split()[1]) * 1024
            for task in os.listdir(f"/proc/{pid}/task"):
                waiting += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return total


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def warm(folder: Path) -> None:
    """Have the files in the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                while file.read(1 << 22):
                    pass


def hardware() -> str:
    """Processor, cores that this process may use, and how busy they were."""
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    return f"{reporting.processor()}, {cores} cores, load {load:.1f}, pyarrow {version('pyarrow')}"


def version(package: str) -> str:
    return importlib.metadata.version(package)


def report(figure: str, values: Sequence[float], **line: Any) -> None:
    """See `reporting.report`."""
    reporting.report("stream", figure, values, hardware=hardware(), **line)


def peers() -> dict[str, str]:
    """The other readers that are here, and what to call them."""
    found = {}
    loads: dict[str, tuple[str, Callable[[], Any]]] = {
        "mosaicml": ("mosaicml-streaming", import_mosaicml),
        "litdata": ("litdata", lambda: importlib.import_module("litdata")),
    }
    for name, (package, load) in loads.items():
        try:
            load()
            found[name] = f"{package} {version(package)}"
        except ImportError as error:
            print(f"stream: {package} cannot be imported ({error}); its figures are left out", file=sys.stderr)
    return found


def write_all(root: Path, formats: Sequence[str], num_tokens: int) -> int:
    """Write the data set in all formats; real tokens."""
    writers = [WRITERS[name](root / name, SEQ_LEN) for name in formats]
    tokens = 0
    for packs in groups(num_tokens, SEQ_LEN):
        tokens += int(packs.num_tokens.sum())
        for writer in writers:
            writer.add(packs)
    for writer in writers:
        writer.close()
    return tokens


def measure(root: Path, num_tokens: int, repeats: int, seconds: float) -> None:
    names = peers()
    formats = ["packsvc", "packsvc-none", *names]
    tokens = write_all(root, formats, num_tokens)
    sizes = {name: size_of(root / name) / tokens for name in formats}
    for peer, called in names.items():
        report(
            f"bytes_per_token_over_{peer}",
            [sizes["packsvc"] / sizes[peer]],
            goal=0.45,
            better="lower",
            unit="ratio",
            against=f"{called}, ids, mask and boundaries",
        )
    for name in formats:
        warm(root / name)
    rates: dict[tuple[str, int], list[float]] = {}
    most: dict[tuple[str, int], list[float]] = {}
    firsts: dict[float, list[float]] = {}
    for repeat in range(repeats):
        for workers in WORKERS:
            for name in formats:
                found, memory_used = run(["--child", name, str(root / name), str(workers), str(seconds)])
                rates.setdefault((name, workers), []).append(found["rate"])
                most.setdefault((name, workers), []).append(memory_used)
                print(
                    f"stream: repeat {repeat}, {name}, {workers} workers: {found['rate'] / 1e6:.1f} M tokens/s, first "
                    f"batch {found['first'] * 1e3:.0f} ms, {memory_used / 2**20:.0f} MiB",
                    file=sys.stderr,
                    flush=True,
                )
        found, _ = run(["--first", str(root / "packsvc")])
        for place, value in zip(RESUME_AT, found, strict=True):
            firsts.setdefault(place, []).append(1e3 * value)
    compare(names, rates, most)
    for place, values in firsts.items():
        where = "start" if place == 0 else f"{100 * place:.0f}_percent"
        report(
            f"first_batch_at_{where}",
            values,
            goal=15,
            better="lower",
            unit="ms",
            against="opening the output anew, imports done",
        )


def compare(
    names: dict[str, str], rates: dict[tuple[str, int], list[float]], most: dict[tuple[str, int], list[float]]
) -> None:
    """The ratios of each repeat."""

    def ratios(values: dict[tuple[str, int], list[float]], mine: str, other: str, workers: int) -> list[float]:
        return [a / b for a, b in zip(values[mine, workers], values[other, workers], strict=True)]

    goals = {("mosaicml", 0): 8.0, ("litdata", 0): 1.0, ("mosaicml", 2): 10.0, ("litdata", 2): 10.0}
    for (peer, workers), goal in goals.items():
        if peer not in names:
            continue
        against = f"{names[peer]}, {workers} workers"
        speed = ratios(rates, "packsvc", peer, workers)
        figure = f"speed_over_{peer}_{workers}_workers"
        report(figure, speed, goal=goal, better="higher", unit="ratio", against=against)
    if "litdata" in names:
        speed = ratios(rates, "packsvc-none", "litdata", 0)
        against = f"{names['litdata']}, 0 workers; packsvc uncompressed too"
        figure = "speed_over_litdata_0_workers_uncompressed"
        report(figure, speed, goal=2.0, better="higher", unit="ratio", against=against)
    for peer, called in names.items():
        used = ratios(most, "packsvc", peer, 2)
        against = f"{called}, 2 workers; anonymous and shared"
        report(f"memory_over_{peer}_2_workers", used, goal=0.4, better="lower", unit="ratio", against=against)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=50_000_000, help="size of the data set")
    parser.add_argument("--full", action="store_true", help="200 million tokens")
    parser.add_argument("--repeats", type=int, default=3, help="times each reader runs (at least 3)")
    parser.add_argument("--seconds", type=float, default=60, help="longest that a reader reads at a time")
    parser.add_argument("--folder", help="where to write the data set, and leave it; default: a temporary folder")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--first", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        reader, folder, workers, seconds = arguments.child
        child(reader, folder, int(workers), float(seconds))
    if arguments.first:
        first_batches(arguments.first)
        return
    num_tokens = 200_000_000 if arguments.full else arguments.tokens
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(arguments.folder or temporary)
        root.mkdir(parents=True, exist_ok=True)
        measure(root, num_tokens, max(3, arguments.repeats), arguments.seconds)


if __name__ == "__main__":
    main()
