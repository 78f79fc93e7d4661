"""One JSON line a figure, as in benchmarks/."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
from collections.abc import Sequence
from typing import Any

import packsvc


def line(
    figure: str, values: Sequence[float], *, goal: float | None, better: str, unit: str, against: str, **more: Any
) -> dict[str, Any]:
    """Median of the repeats, with their extremes."""
    return {
        "benchmark": "proof",
        "figure": figure,
        "value": round(statistics.median(values), 6),
        "goal": goal,
        "better": better,
        "spread": [round(min(values), 6), round(max(values), 6)],
        "unit": unit,
        "against": against,
        "version": packsvc.__version__,
        "hardware": hardware(),
        "date": datetime.date.today().isoformat(),
        **more,
    }


def emit(figure: str, values: Sequence[float], **rest: Any) -> None:
    print(json.dumps(line(figure, values, **rest)), flush=True)


def hardware() -> str:
    """The processor, as the system names it."""
    try:
        with open("/proc/cpuinfo") as file:
            name = next(text.split(":", 1)[1].strip() for text in file if text.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"
