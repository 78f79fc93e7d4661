"""Reads ahead with threads, without changing the order.

Threads, not forked workers: a DataLoader with two forked workers was 10 to 60 times slower on the same source,
and forks are behind half of the hangs that readers are known for. What is read ahead counts for nothing: a
reader's position is what was handed out.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

import numpy as np

A = TypeVar("A")
B = TypeVar("B")

_KEPT_BYTES = 24 << 20
AHEAD = 2
"""Items being made or waiting, beyond one for each thread."""


def prefetch(work: Callable[[A], B], items: Iterable[A], *, threads: int) -> Generator[B, None, None]:
    """`map(work, items)`, in order, with `threads` threads working ahead; 0: none, each when it is asked for.

    An error is raised where its result would have come. Closing the iterator stops the threads.
    """
    if threads == 0:
        yield from map(work, items)
        return
    pid = os.getpid()
    todo = iter(items)
    # The first is made by whoever asks for it: it comes in half the time when no thread makes another beside it.
    for item in islice(todo, 1):
        yield work(item)
    _keep_freed_memory()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="packsvc-read")
    waiting: deque[Future[B]] = deque()
    try:
        for item in todo:
            waiting.append(pool.submit(work, item))
            if len(waiting) == threads + AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        if os.getpid() == pid:
            pool.shutdown(wait=True, cancel_futures=True)


def _keep_freed_memory() -> None:
    """Have glibc's malloc keep the memory of batches for the next ones, where it gave it back and fetched it anew.

    It raises its limits, of all threads, to the largest block that was freed; below 32 MiB. Harmless elsewhere.
    """
    np.empty(_KEPT_BYTES, dtype=np.uint8)
