"""Run one function over many items: here, in threads, or as Ray tasks; results come in the order of the items.

Threads are enough on one machine for shards, since decompressing, hashing and numpy let go of the interpreter.
A few items are in flight at a time, so that results of shards that wait for an earlier one stay few.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from packsvc.errors import ClusterError

T = TypeVar("T")
R = TypeVar("R")


def run_over(function: Callable[[T], R], items: Sequence[T], *, workers: int, address: str | None) -> Iterator[R]:
    """Results of `function` for every item, in order.

    Args:
        workers: 0 or 1: in this thread; more: so many threads.
        address: Of a Ray cluster; then `workers` is the number of tasks in flight (0: its CPUs).

    Raises:
        ClusterError: The cluster does not answer.
    """
    if address is not None:
        return _on_ray(function, items, workers=workers, address=address)
    if workers > 1 and len(items) > 1:
        return _in_threads(function, items, workers=workers)
    return (function(item) for item in items)


def _in_threads(function: Callable[[T], R], items: Sequence[T], *, workers: int) -> Iterator[R]:
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque[Future[R]] = deque()
        for item in items:
            if len(waiting) >= 2 * workers:
                yield waiting.popleft().result()
            waiting.append(pool.submit(function, item))
        while waiting:
            yield waiting.popleft().result()


def _on_ray(function: Callable[[T], R], items: Sequence[T], *, workers: int, address: str) -> Iterator[R]:
    import ray as untyped_ray

    ray: Any = untyped_ray
    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise ClusterError(f"no Ray cluster answers at {address}: {' '.join(str(error).split())}") from error
    window = 2 * (workers or max(1, int(ray.cluster_resources().get("CPU", 1))))
    task = ray.remote(num_cpus=1, scheduling_strategy="SPREAD")(function)
    waiting: deque[Any] = deque()
    try:
        for item in items:
            if len(waiting) >= window:
                yield ray.get(waiting.popleft())
            waiting.append(task.remote(item))
        while waiting:
            yield ray.get(waiting.popleft())
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, Exception) else error) from error
    except ray.exceptions.RayError as error:
        raise ClusterError(f"the Ray cluster at {address} failed: {' '.join(str(error).split())[:500]}") from error
