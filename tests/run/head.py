"""A real Ray head for tests: its own ports, folder and token; ended by its own process group and no other way."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TOKEN = "0123456789abcdef" * 3
STARTS_IN_SECONDS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Where the head is and how one gets in."""

    address: str
    token: str


@contextlib.contextmanager
def ray_head(*, cpus: int = 2) -> Iterator[Head]:
    """A head with token authentication on, whose dashboard answers."""
    folder = Path(tempfile.mkdtemp(prefix="rh", dir="/tmp"))  # short: socket paths have at most 107 bytes
    (folder / "token").write_text(TOKEN)
    gcs, dashboard, agent, agent_rpc, metrics, client = _free_ports(6)
    bin_folder = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--num-cpus={cpus}",
        f"--port={gcs}", f"--dashboard-port={dashboard}", "--dashboard-host=127.0.0.1",
        f"--dashboard-agent-listen-port={agent}", f"--dashboard-agent-grpc-port={agent_rpc}",
        f"--metrics-export-port={metrics}", f"--ray-client-server-port={client}",
        "--object-store-memory=80000000", f"--temp-dir={folder}/t", "--disable-usage-stats",
    ]  # fmt: skip
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        head = Head(address=f"http://127.0.0.1:{dashboard}", token=TOKEN)
        _await_answer(head, process, folder / "log")
        yield head
    finally:
        _end(process)
        shutil.rmtree(folder, ignore_errors=True)


def _free_ports(n: int) -> list[int]:
    """Below those that systems hand out by themselves and above those of Ray's workers."""
    found: list[int] = []
    start = 20000 + os.getpid() * 7 % 10000
    for port in range(start, 32000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            found.append(port)
        if len(found) == n:
            return found
    raise RuntimeError("no free ports")


def _await_answer(head: Head, process: subprocess.Popen[bytes], log: Path) -> None:
    request = urllib.request.Request(f"{head.address}/api/version", headers={"Authorization": f"Bearer {TOKEN}"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + STARTS_IN_SECONDS
    while True:
        with contextlib.suppress(OSError):
            opener.open(request, timeout=5).close()
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the head did not start:\n{log.read_text()[-3000:]}")
        time.sleep(0.2)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the head and what it started: all that is of its session, which this process opened."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pid in _of_session(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _of_session(session: int) -> list[int]:
    """Processes of a session, workers in groups of their own too."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            after_name = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(after_name[3]) == session:
                found.append(int(folder.name))
    return found
