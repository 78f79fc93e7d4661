"""How fast, how full and how lean is packing of lengths? One JSON line per figure.

    python benchmarks/pack.py [--repeats 3]

Lengths are synthetic: case `a` is like instruction data (lognormal, median 350, sigma 1, packs of 4096), `b` short
instructions in packs of 8192, `c` two humps around 300 and 1850 in packs of 8192 and 32768. Every ratio comes from
one run: both sides are timed in turn, once per repeat; the value is the median ratio, the spread its extremes.
A peer that cannot be imported is named on stderr and its figure left out.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import os
import subprocess
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import reporting
from numpy.typing import NDArray

from packsvc.plan import ffd, lower_bound, place

Lengths = NDArray[np.int32]
MEMORY_FLAG = "--print-extra-bytes"


def lengths_of(case: str, n: int) -> tuple[Lengths, int]:
    """Lengths of a case and the capacity they are packed to."""
    rng = np.random.default_rng(0)
    if case == "a":
        capacity, lengths = 4096, rng.lognormal(math.log(350), 1.0, n)
    elif case == "b":
        capacity, lengths = 8192, rng.lognormal(math.log(80), 0.7, n)
    else:
        capacity = int(case.removeprefix("c"))
        short = rng.random(n) < 0.6
        lengths = np.where(short, rng.lognormal(math.log(300), 0.8, n), rng.lognormal(math.log(1850), 0.7, n))
    return np.clip(np.rint(lengths), 8, capacity).astype(np.int32), capacity


def report(figure: str, values: Sequence[float], **line: Any) -> None:
    """See `reporting.report`."""
    reporting.report("pack", figure, values, hardware=hardware(), **line)


def hardware() -> str:
    """Processor, cores that this process may use, and numpy, which does the work."""
    return f"{reporting.processor()}, {len(os.sched_getaffinity(0))} cores, numpy {np.__version__}"


def seconds(call: Callable[[], Any]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def best_fit_decreasing_of_trl(lengths: Lengths, capacity: int) -> int:
    """The steps of TRL's `bfd` packing on its own tree of free spaces, without moving tokens; bins opened."""
    from trl.data_utils import _SegmentTree

    tree, waiting = _SegmentTree(capacity), defaultdict(deque)
    tree.add(capacity)
    bins = []
    order = np.argsort(-lengths, kind="stable")
    for length, index in zip(lengths[order], order, strict=True):
        space = tree.search(length)
        if space < capacity:
            found = waiting[space].popleft()
            if not waiting[space]:
                tree.remove(space)
        else:
            found = {"ids": [], "length": 0}
            bins.append(found)
        found["ids"].append(index)
        found["length"] += length
        left = space - length
        waiting[left].append(found)
        if left > 0:
            tree.add(left)
    return len(bins)


def plain_first_fit_decreasing(lengths: list[int], capacity: int) -> list[int]:
    """First-fit decreasing as anyone writes it in Python."""
    room: list[int] = []
    placed = [0] * len(lengths)
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        for bin_, space in enumerate(room):
            if length <= space:
                room[bin_] = space - length
                placed[index] = bin_
                break
        else:
            placed[index] = len(room)
            room.append(capacity - length)
    return placed


def speed_against_trl(repeats: int) -> None:
    try:
        version = importlib.metadata.version("trl")
        from trl.data_utils import _SegmentTree  # noqa: F401
    except ImportError as error:
        print(f"pack: trl cannot be imported ({error}); its figure is left out", file=sys.stderr)
        return
    lengths, capacity = lengths_of("a", 1_000_000)
    ratios = []
    for _ in range(repeats):
        theirs = seconds(lambda: best_fit_decreasing_of_trl(lengths, capacity))
        ratios.append(theirs / seconds(lambda: ffd(lengths, capacity)))
    report(
        "speedup_over_trl_bfd_1m", ratios, goal=100, better="higher", unit="ratio", against=f"trl {version} bfd loop"
    )


def speed_against_plain_python(repeats: int) -> None:
    lengths, capacity = lengths_of("a", 60_000)
    listed = lengths.tolist()
    if plain_first_fit_decreasing(listed[:3000], capacity) != ffd(lengths[:3000], capacity).tolist():
        raise SystemExit("pack: ffd and the plain loop differ")
    ratios = []
    for _ in range(repeats):
        plain = seconds(lambda: plain_first_fit_decreasing(listed, capacity))
        ratios.append(plain / seconds(lambda: ffd(lengths, capacity)))
    report(
        "speedup_over_plain_python_ffd_60k",
        ratios,
        goal=400,
        better="higher",
        unit="ratio",
        against="double loop in Python",
    )


def speed_against_sort(repeats: int) -> None:
    lengths, capacity = lengths_of("a", 10_000_000)
    small = lengths_of("a", 1_000_000)[0]
    to_sort, to_argsort, exponents = [], [], []
    keys = (capacity - lengths).astype(np.uint16)
    for _ in range(max(repeats, 5)):
        ours = seconds(lambda: ffd(lengths, capacity))
        to_sort.append(ours / seconds(lambda: np.sort(lengths)))
        to_argsort.append(ours / seconds(lambda: np.argsort(keys, kind="stable")))
        exponents.append(math.log10(ours / seconds(lambda: ffd(small, capacity))))
    numpy = f"numpy {np.__version__}"
    report("over_np_sort_10m", to_sort, goal=2.0, better="lower", unit="ratio", against=f"{numpy} sort of the lengths")
    report(
        "over_np_stable_argsort_10m",
        to_argsort,
        goal=2.0,
        better="lower",
        unit="ratio",
        against=f"{numpy} stable argsort of 16-bit keys",
    )
    report("growth_exponent_1m_to_10m", exponents, goal=1.1, better="lower", unit="exponent", against="itself")


def extra_memory(repeats: int) -> None:
    n = 10_000_000
    command = [sys.executable, os.path.abspath(__file__), MEMORY_FLAG, str(n)]
    values = [int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) / n for _ in range(3)]
    report(
        "extra_bytes_per_example_10m",
        values[: max(repeats, 3)],
        goal=32,
        better="lower",
        unit="bytes",
        against="resident memory before the call",
    )


def print_extra_bytes(n: int) -> None:
    """Peak memory of one call over what stood before, the result included; in a process of its own."""
    lengths, capacity = lengths_of("a", n)
    ffd(lengths[:2000], capacity)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = _status("VmRSS")
    ffd(lengths, capacity)
    print(_status("VmHWM") - before)


def _status(key: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(row.split()[1]) * 1024 for row in file if row.startswith(key))


def bins_over_bound() -> None:
    over = []
    for case in ("a", "b", "c8192", "c32768"):
        for n in (100_000, 1_000_000):
            lengths, capacity = lengths_of(case, n)
            bound = lower_bound(lengths, capacity)
            over.append(100 * (int(ffd(lengths, capacity).max()) + 1 - bound) / bound)
    report(
        "bins_over_bound",
        [max(over)],
        goal=0.1,
        better="lower",
        unit="percent",
        against="Martello-Toth L2, the worst of four cases at 100k and 1M",
    )


def efficiency_in_groups() -> None:
    lengths, capacity = lengths_of("a", 1_000_000)
    tokens = int(lengths.sum(dtype=np.int64))

    def points(parts: Sequence[Lengths]) -> float:
        packs = sum(place(part, capacity, seed=0).num_packs for part in parts)
        return 100 * tokens / (packs * capacity)

    lost = points([lengths]) - points(np.array_split(lengths, 128))
    report(
        "points_lost_in_128_groups",
        [lost],
        goal=0.1,
        better="lower",
        unit="points of efficiency",
        against="1 group of the same rows, no last round",
    )
    part = lengths[:65536]
    random = place(part, capacity, strategy="first_fit_random").num_packs
    full, mixed = (100 * int(part.sum()) / (packs * capacity) for packs in (place(part, capacity).num_packs, random))
    report(
        "points_lost_by_first_fit_random",
        [full - mixed],
        goal=0.25,
        better="lower",
        unit="points of efficiency",
        against="ffd on the same 65,536 rows",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="times each ratio is measured (at least 3)")
    parser.add_argument(MEMORY_FLAG, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.print_extra_bytes:
        print_extra_bytes(arguments.print_extra_bytes)
        return
    repeats = max(3, arguments.repeats)
    bins_over_bound()
    efficiency_in_groups()
    extra_memory(repeats)
    speed_against_sort(repeats)
    speed_against_trl(repeats)
    speed_against_plain_python(repeats)


if __name__ == "__main__":
    main()
