"""Where tasks run: in this process, or on Ray. Both yield outcomes as they come; neither knows what a task is.

On Ray a task is one idempotent function call with small arguments and a small answer, so nothing large is in
the object store, and any worker, node or driver may die: what is lost is what was in flight. A window of
about twice the CPUs is kept in flight, recomputed as the cluster grows and shrinks.
"""

from __future__ import annotations

import importlib
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from packsvc.cluster import leave_ray, start_ray
from packsvc.errors import ClusterError, PacksvcError

WINDOW_PER_CPU = 2
WAIT_SECONDS = 5.0
STALL_SECONDS = 120.0
SYSTEM_RETRIES = 5

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one task ended."""

    task: int
    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    node: str = ""
    lost: bool = False
    """The worker or its node died, on every try: the task itself may be right."""


class Executor(Protocol):
    """Runs tasks and yields their outcomes in the order in which they end."""

    def run(
        self, function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]], *, memory_bytes: int = 0
    ) -> Iterator[Outcome | None]:
        """Call `function(*task)` for each task. Yields None now and then while nothing ended."""
        ...

    def close(self) -> None: ...


class InProcess:
    """One task after the other, here: for debugging, and for what needs no cluster."""

    def run(
        self, function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]], *, memory_bytes: int = 0
    ) -> Iterator[Outcome | None]:
        for number, task in enumerate(tasks):
            try:
                yield Outcome(task=number, value=function(*task), node="in-process")
            except Exception as error:
                yield Outcome(task=number, error=error, trace=traceback.format_exc(), node="in-process")

    def close(self) -> None:
        """Nothing to close."""


class OnRay:
    """Ray Core tasks on an embedded local cluster or on the one at `address`."""

    def __init__(self, *, workers: int | None, address: str | None, say: Say) -> None:
        ray: Any = importlib.import_module("ray")
        self._ray = ray
        self._say = say
        self._mine = start_ray(ray, workers=workers, address=address, say=say)

    def run(
        self, function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]], *, memory_bytes: int = 0
    ) -> Iterator[Outcome | None]:
        ray = self._ray
        remote = ray.remote(_call).options(
            num_cpus=1,
            memory=self._memory(memory_bytes),
            max_retries=SYSTEM_RETRIES,
            scheduling_strategy="SPREAD",
            name=getattr(function, "__name__", "task"),
        )
        waiting = list(range(len(tasks)))[::-1]
        running: dict[Any, int] = {}
        quiet_since = time.monotonic()
        while waiting or running:
            while waiting and len(running) < self._window():
                number = waiting.pop()
                running[remote.remote(function, tasks[number])] = number
            ready, _ = ray.wait(list(running), num_returns=1, timeout=WAIT_SECONDS)
            for reference in ready:
                quiet_since = time.monotonic()
                yield self._outcome(reference, running.pop(reference))
            if not ready:
                yield None
                if time.monotonic() - quiet_since > STALL_SECONDS:
                    quiet_since = time.monotonic()
                    self._say(self._why_nothing_ends(len(running), len(waiting)))

    def close(self) -> None:
        """Stop the embedded cluster; one that was there before is left alone."""
        if self._mine:
            leave_ray(self._ray)

    def _outcome(self, reference: Any, number: int) -> Outcome:
        try:
            value, error, trace, node = self._ray.get(reference)
        except self._ray.exceptions.RayError as lost:
            return Outcome(task=number, error=ClusterError(_first_line(lost)), trace=str(lost), lost=True)
        return Outcome(task=number, value=value, error=error, trace=trace, node=node)

    def _window(self) -> int:
        return max(2, int(WINDOW_PER_CPU * self._ray.cluster_resources().get("CPU", 1)))

    def _memory(self, wanted: int) -> int:
        """What is asked for a task, at most what the largest node can give to one of its CPUs."""
        most = 0.0
        for node in self._ray.nodes():
            resources = node.get("Resources", {})
            if node.get("Alive") and resources.get("CPU"):
                most = max(most, resources.get("memory", 0.0) / resources["CPU"])
        return int(min(wanted, most)) if most else 0

    def _why_nothing_ends(self, running: int, waiting: int) -> str:
        have, free = self._ray.cluster_resources(), self._ray.available_resources()
        return (
            f"nothing ended for {STALL_SECONDS:.0f} s: {running} tasks submitted, {waiting} waiting; the cluster has "
            f"{have.get('CPU', 0):g} CPUs, {free.get('CPU', 0):g} free, and {free.get('memory', 0) / 2**30:.1f} GiB of "
            f"memory free. If CPUs are free, tasks wait for memory or workers cannot start: see `ray status`."
        )


def _call(function: Callable[..., Any], task: tuple[Any, ...]) -> tuple[Any, BaseException | None, str, str]:
    """Run a task in a worker; its failure travels as a value, so that Ray retries only lost workers."""
    import platform

    try:
        return function(*task), None, "", platform.node()
    except PacksvcError as error:
        return None, error, traceback.format_exc(), platform.node()
    except Exception as error:
        plain = RuntimeError(f"{type(error).__name__}: {error}")
        return None, plain, traceback.format_exc(), platform.node()


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def make_executor(*, workers: int | None, address: str | None, say: Say) -> Executor:
    """`workers` 0 runs in this process; otherwise on Ray, embedded unless an address is given."""
    if workers == 0:
        return InProcess()
    return OnRay(workers=workers, address=address, say=say)


def memory_for(group_bytes: Sequence[int]) -> int:
    """Memory to ask for a group: its text at 20 bytes a token and 3.5 bytes of text a token, plus the runtime:
    transformers, torch, Arrow, and a tokenizer of 150,000 words take about 620 MiB.
    """
    return int(max(group_bytes, default=0) * 20 / 3.5) + 700 * 2**20
