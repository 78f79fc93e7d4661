"""The jobs of a cluster: list them, look at one, follow it, stop it, through Ray's job API.

What the cluster knows is asked for each time; nothing is kept here. Following survives lost connections: the logs
are followed again from where they broke off, and asked after the job when they fall silent, since a dropped
connection says nothing either.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from packsvc.errors import ClusterError, ConfigError
from packsvc.run.dashboard import Dashboard, open_dashboard

OVER = ("SUCCEEDED", "FAILED", "STOPPED")
STOP_SECONDS = 60.0
POLL_SECONDS = 0.5
QUIET_SECONDS = 10.0
"""After so long without a word it is asked whether the job has ended: a dropped connection says nothing either."""
LOST_SECONDS = 60.0

Say = Callable[[str], None]


def tell(text: str) -> None:
    """Where a caller has no better place for it."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterJob:
    """A job as its cluster knows it."""

    id: str
    status: str
    """PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED."""
    message: str
    exit_code: int | None
    """Of the command that ran, as far as it came to an end."""
    started_at: float | None
    ended_at: float | None
    """Both in seconds since 1970."""
    entrypoint: str
    metadata: dict[str, str]

    @property
    def is_over(self) -> bool:
        return self.status in OVER

    @property
    def name(self) -> str | None:
        return self.metadata.get("name")

    @property
    def output(self) -> str | None:
        return self.metadata.get("output")

    @property
    def is_packsvc(self) -> bool:
        """Whether packsvc submitted it."""
        return "packsvc_version" in self.metadata

    @property
    def command_exit_code(self) -> int:
        """What `--wait` ends with: the job's own code; 3 where it was ended from outside and can be resumed."""
        if self.status == "SUCCEEDED":
            return 0
        if self.status == "STOPPED" or not self.exit_code or self.exit_code < 0 or self.exit_code > 128:
            return ClusterError.exit_code
        return self.exit_code

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "name": self.name, "output": self.output}


def list_jobs(
    address: str | None = None,
    *,
    everything: bool = False,
    insecure: bool = False,
    wait_for_dashboard: float = 0.0,
    say: Say = tell,
) -> list[ClusterJob]:
    """The jobs that packsvc submitted to a cluster, the newest first; `everything`: all that were submitted."""
    dashboard = open_dashboard(address, insecure=insecure, wait_seconds=wait_for_dashboard, say=say)
    found = [job for job in all_jobs(dashboard) if everything or job.is_packsvc]
    return sorted(found, key=lambda job: (job.started_at or 0.0, job.id), reverse=True)


def job_status(
    job_id: str,
    address: str | None = None,
    *,
    insecure: bool = False,
    wait_for_dashboard: float = 0.0,
    say: Say = tell,
) -> ClusterJob:
    """One job. Raises ConfigError when the cluster does not know it."""
    return look_up(open_dashboard(address, insecure=insecure, wait_seconds=wait_for_dashboard, say=say), job_id)


def job_logs(
    job_id: str,
    address: str | None = None,
    *,
    follow: bool = False,
    insecure: bool = False,
    wait_for_dashboard: float = 0.0,
    say: Say = tell,
) -> Iterator[str]:
    """What a job has printed, in pieces; `follow`: until it has ended. Raises ConfigError for an unknown id."""
    dashboard = open_dashboard(address, insecure=insecure, wait_seconds=wait_for_dashboard, say=say)
    look_up(dashboard, job_id)
    if follow:
        return follow_logs(dashboard, job_id)
    return iter([dashboard.call(f"logs of {job_id}", lambda: dashboard.client.get_job_logs(checked_id(job_id)))])


def stop_job(
    job_id: str,
    address: str | None = None,
    *,
    insecure: bool = False,
    wait_seconds: float = STOP_SECONDS,
    wait_for_dashboard: float = 0.0,
    say: Say = tell,
) -> ClusterJob:
    """Stop a job and wait until it has ended; one that has ended already is left as it is.

    Raises:
        ConfigError: The cluster does not know the id.
        ClusterError: It runs on after `wait_seconds`.
    """
    dashboard = open_dashboard(address, insecure=insecure, wait_seconds=wait_for_dashboard, say=say)
    found = look_up(dashboard, job_id)
    if found.is_over:
        return found
    dashboard.call(f"stop of {job_id}", lambda: dashboard.client.stop_job(checked_id(job_id)))
    deadline = time.monotonic() + wait_seconds
    while not (found := look_up(dashboard, job_id)).is_over:
        if time.monotonic() > deadline:
            raise ClusterError(f"{job_id}: still {found.status} {wait_seconds:.0f} s after it was told to stop")
        time.sleep(POLL_SECONDS)
    return found


# ---- asking an open dashboard


def checked_id(job_id: str) -> str:
    """An id that can stand in a URL."""
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", job_id):
        raise ConfigError(f"job id {job_id!r}: letters, digits, - _ and . only")
    return job_id


def all_jobs(dashboard: Dashboard) -> list[ClusterJob]:
    found = dashboard.call("list of jobs", dashboard.client.list_jobs)
    return [_record(details) for details in found if details.submission_id]


def look_up(dashboard: Dashboard, job_id: str) -> ClusterJob:
    checked_id(job_id)
    return _record(dashboard.call(f"job {job_id}", lambda: dashboard.client.get_job_info(job_id)))


def is_known(dashboard: Dashboard, job_id: str) -> bool:
    try:
        look_up(dashboard, job_id)
    except (ConfigError, ClusterError):
        return False
    return True


def _record(details: Any) -> ClusterJob:
    return ClusterJob(
        id=str(details.submission_id or details.job_id),
        status=str(getattr(details.status, "value", details.status)),
        message=" ".join((details.message or "").split()),
        exit_code=details.driver_exit_code,
        started_at=details.start_time / 1000 if details.start_time else None,
        ended_at=details.end_time / 1000 if details.end_time else None,
        entrypoint=details.entrypoint,
        metadata=dict(details.metadata or {}),
    )


def follow_logs(dashboard: Dashboard, job_id: str) -> Iterator[str]:
    """The logs of a job until it has ended, each character once, over lost connections."""
    given, lost_since = 0, None
    while True:
        at = 0  # A new connection tells everything from the start.
        try:
            for text in _tail(dashboard, job_id):
                if text is None:
                    if look_up(dashboard, job_id).is_over:
                        break
                    continue
                fresh = text[max(0, given - at) :]
                at += len(text)
                given += len(fresh)
                if fresh:
                    yield fresh
            if look_up(dashboard, job_id).is_over:
                rest = dashboard.call(f"logs of {job_id}", lambda: dashboard.client.get_job_logs(job_id))[given:]
                if rest:
                    yield rest
                return
            lost_since = None
        except ClusterError as error:
            lost_since = lost_since or time.monotonic()
            if time.monotonic() - lost_since > LOST_SECONDS:
                raise ClusterError(
                    f"{error}; the job may go on: `packsvc jobs status {job_id}` tells, and submitting it again resumes"
                ) from error
        time.sleep(POLL_SECONDS)


def _tail(dashboard: Dashboard, job_id: str) -> Iterator[str | None]:
    """One connection to the logs; None now and then while nothing comes. Raises ClusterError when it breaks."""
    loop = asyncio.new_event_loop()
    stream = dashboard.client.tail_job_logs(job_id)

    async def step() -> str:
        text: str = await anext(stream)
        return text

    task: asyncio.Task[str] | None = None
    try:
        while True:
            task = task or loop.create_task(step())
            loop.run_until_complete(asyncio.wait({task}, timeout=QUIET_SECONDS))
            if not task.done():
                yield None
                continue
            try:
                text, task = task.result(), None
            except StopAsyncIteration:
                task = None
                return
            except Exception as error:
                task = None
                raise dashboard.told(f"logs of {job_id}", error) from error
            yield text
    finally:
        if task is not None:
            task.cancel()
            loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
        loop.run_until_complete(stream.aclose())
        loop.close()
