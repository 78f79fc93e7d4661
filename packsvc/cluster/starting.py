"""Connecting to Ray, starting an embedded one, and leaving it, so that a signal at any moment ends as it should.

Ray puts a handler of its own on SIGTERM, and aborts in its C++ when Python leaves `ray.init` or `ray.shutdown`
half-way. So the caller's handlers stay, and a signal that comes inside one of the two is kept until it is over.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

from packsvc.errors import ClusterError

CONNECT_SECONDS = 10.0
START_SECONDS = "150"
"""Ray itself gives up after 30 s, which a busy machine may need."""
START_TRIES = 2
OBJECT_STORE_BYTES = 80 * 2**20
"""Near the least that Ray accepts: tasks return a few kilobytes."""
WORKER_ENVIRONMENT = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
ENDING = (signal.SIGINT, signal.SIGTERM)


def start_ray(ray: Any, *, workers: int | None, address: str | None, say: Callable[[str], None]) -> bool:
    """Connect to the cluster at `address`, else start one here; whether there is something to leave at the end.

    Raises:
        ClusterError: Nothing answers, or Ray's processes did not come up.
    """
    if ray.is_initialized():
        return False
    if address is not None:
        check_listens(address)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")
    os.environ.setdefault("RAY_raylet_start_wait_time_s", START_SECONDS)
    passed_on = {k: v for k, v in os.environ.items() if k.startswith(("HF_", "PACKSVC_"))}
    options: dict[str, Any] = {
        "address": address,
        "log_to_driver": False,
        "logging_level": "ERROR",
        "runtime_env": {"env_vars": {**WORKER_ENVIRONMENT, **passed_on}},
    }
    if address is not None:
        _init(ray, options, say, tries=1)
        return True
    here = {"address": "local", "num_cpus": workers or os.cpu_count(), "include_dashboard": False}
    _init(ray, {**options, **here, "object_store_memory": OBJECT_STORE_BYTES}, say, tries=START_TRIES)
    return True


def leave_ray(ray: Any) -> None:
    """Disconnect, and end the processes of a Ray that was started here.

    Tasks in flight are not cancelled: a task that ends while it is being cancelled aborts this process inside
    Ray ("Tried to complete task that was not pending"). They end with their workers, or commit what is right.
    """
    with signals_later():
        ray.shutdown()


def _init(ray: Any, options: Mapping[str, Any], say: Callable[[str], None], *, tries: int) -> None:
    for left in reversed(range(tries)):
        try:
            with signals_later():
                ray.init(**options)
            return
        except Exception as error:  # a plain Exception where one of its processes is late
            leave_ray(ray)
            if left == 0 or isinstance(error, ValueError):
                words = " ".join(str(error).split())
                raise ClusterError(
                    f"Ray at {options['address']}: no cluster could be reached or started: {words}"
                ) from error
            say(f"Ray did not come up ({' '.join(str(error).split())[:200]}); starting it once more")
        except BaseException:
            leave_ray(ray)
            raise


def check_listens(address: str) -> None:
    """Ask first whether anything listens at host:port: Ray itself would go on asking for many minutes.

    Raises:
        ClusterError: Nothing does.
    """
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdigit():
        return  # "auto" and the like: Ray knows at once
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise ClusterError(f"Ray at {address}: no cluster could be reached: {error}") from error


@contextlib.contextmanager
def signals_later() -> Iterator[None]:
    """Keep SIGINT and SIGTERM until the block is over, then hand the first to the caller's handler.

    A second one, from someone out of patience, is handled at once. Handlers set inside the block are not kept.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in ENDING}
    came: list[int] = []

    def keep(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if len(came) > 1:
            _handle(before[signal.Signals(number)], number, frame)

    real = signal.signal
    for number in ENDING:
        real(number, keep)
    # Ray calls it inside `init`; signals can be set in this thread only, so nobody else sees the change.
    signal.signal = lambda number, handler: before.get(signal.Signals(number))  # type: ignore[assignment]
    try:
        yield
    finally:
        signal.signal = real
        for number, handler in before.items():
            # None: set by something that is not Python, and cannot be put back
            real(number, signal.SIG_DFL if handler is None else handler)
        if came:
            _handle(before[signal.Signals(came[0])], came[0], None)


def _handle(handler: Any, number: int, frame: FrameType | None) -> None:
    if callable(handler):
        handler(number, frame)
    elif handler is not signal.SIG_IGN:
        signal.raise_signal(number)
