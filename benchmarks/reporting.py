"""What every benchmark prints: one JSON line a figure, and what it ran on."""

from __future__ import annotations

import datetime
import json
import statistics
from collections.abc import Sequence
from typing import Any


def report(
    benchmark: str,
    figure: str,
    values: Sequence[float],
    *,
    goal: float | None,
    better: str,
    unit: str,
    against: str,
    hardware: str,
    digits: int = 4,
    worst: bool = False,
    **more: Any,
) -> None:
    """Print one line: the median of some values, or the worst, and their extremes; `more` goes along as it is."""
    import packsvc  # its own word for its version: where a GPU is, it need not be installed

    worse = max if better == "lower" else min
    chosen = worse(values) if worst else statistics.median(values)
    rounded = [float(f"{value:.{digits}g}") for value in (chosen, min(values), max(values))]
    line = {
        "benchmark": benchmark,
        "figure": figure,
        "value": rounded[0],
        "goal": goal,
        "better": better,
        "spread": rounded[1:],
        "unit": unit,
        "against": against,
        **more,
        "version": packsvc.__version__,
        "hardware": hardware,
        "date": datetime.date.today().isoformat(),
    }
    print(json.dumps(line), flush=True)


def processor() -> str:
    """The processor, as the system names it."""
    with open("/proc/cpuinfo") as file:
        for row in file:
            if row.startswith("model name"):
                return row.split(":", 1)[1].strip()
    return "unknown processor"
