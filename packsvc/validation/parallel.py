"""Run one function over many items: here, in threads, or as Ray tasks; results come in the order of the items.

Threads are enough on one machine where the work is decompressing, hashing and numpy, which let go of the
interpreter; encoding does not, so it goes to Ray's processes. A few items are in flight at a time, so that
results which wait for an earlier one stay few.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
from typing import Any, TypeVar

from packsvc.cluster import leave_ray, start_ray
from packsvc.errors import ClusterError

T = TypeVar("T")
R = TypeVar("R")


class Work(Enum):
    """What the function spends its time on."""

    ARRAYS = "arrays"
    """Threads are enough."""
    PYTHON = "python"
    """Processes are needed."""


def run_over(
    function: Callable[[T], R], items: Sequence[T], *, work: Work, workers: int, address: str | None
) -> Iterator[R]:
    """Results of `function` for every item, in order.

    Args:
        workers: 0 or 1: in this thread; more: so many at a time, in threads or on an embedded Ray.
        address: Of a Ray cluster; then `workers` is the number of tasks in flight (0: twice its CPUs).

    Raises:
        ClusterError: The cluster does not answer, or a worker died again and again.
    """
    if address is None and (workers <= 1 or len(items) <= 1):
        return (function(item) for item in items)
    if address is None and work is Work.ARRAYS:
        return _in_threads(function, items, workers=workers)
    return _on_ray(function, items, workers=workers, address=address)


def _in_threads(function: Callable[[T], R], items: Sequence[T], *, workers: int) -> Iterator[R]:
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque[Future[R]] = deque()
        for item in items:
            if len(waiting) >= 2 * workers:
                yield waiting.popleft().result()
            waiting.append(pool.submit(function, item))
        while waiting:
            yield waiting.popleft().result()


def _on_ray(function: Callable[[T], R], items: Sequence[T], *, workers: int, address: str | None) -> Iterator[R]:
    import ray as untyped

    ray: Any = untyped
    mine = start_ray(ray, workers=workers, address=address, say=lambda line: print(line, file=sys.stderr))
    try:
        window = workers or 2 * max(1, int(ray.cluster_resources().get("CPU", 1)))

        def call(item: T) -> R:  # ray takes functions only, no partial ones
            return function(item)

        task = ray.remote(num_cpus=1, scheduling_strategy="SPREAD")(call)
        waiting: deque[Any] = deque()
        for item in items:
            if len(waiting) >= window:
                yield ray.get(waiting.popleft())
            waiting.append(task.remote(item))
        while waiting:
            yield ray.get(waiting.popleft())
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, Exception) else error) from error
    except ray.exceptions.RayError as error:
        words = " ".join(str(error).split())[:500]
        raise ClusterError(f"Ray at {address or 'local'} failed: {words}; validate again") from error
    finally:
        if mine:
            leave_ray(ray)
