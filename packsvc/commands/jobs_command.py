"""`packsvc jobs list|status|logs|stop`: the jobs that were submitted to a cluster."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

from packsvc.commands.door import through_the_door
from packsvc.commands.options import AsJson
from packsvc.commands.printing import facts, print_json, table
from packsvc.commands.submit_command import DashboardAddress, Insecure, WaitForDashboard, to_stderr

JobId = Annotated[str, typer.Argument(metavar="ID", help="A submission id, as `packsvc submit` prints it.")]

jobs = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="""The jobs that were submitted to a Ray cluster: list them, look at one, follow it, stop it.

    \b
    Examples:
      packsvc jobs list --address http://127.0.0.1:8265
      packsvc jobs status packsvc-1f2e3d4c5b6a-1
      packsvc jobs logs packsvc-1f2e3d4c5b6a-1 --follow
      packsvc jobs stop packsvc-1f2e3d4c5b6a-1
    """,
)


def list_(
    address: DashboardAddress = None,
    everything: Annotated[bool, typer.Option("--all", help="Also jobs that packsvc did not submit.")] = False,
    insecure: Insecure = False,
    wait_for_dashboard: WaitForDashboard = 5.0,
    as_json: AsJson = False,
) -> None:
    """The jobs of packsvc on a cluster, the newest first.

    \b
    Example:
      packsvc jobs list --address http://127.0.0.1:8265
    """
    from packsvc.run import list_jobs

    found = list_jobs(
        address, everything=everything, insecure=insecure, wait_for_dashboard=wait_for_dashboard, say=to_stderr
    )
    if as_json:
        print_json([job.to_json() for job in found])
        return
    rows = [
        (
            job.id,
            job.status,
            job.exit_code,
            when(job.started_at),
            took(job.started_at, job.ended_at),
            job.name,
            job.output,
        )
        for job in found
    ]
    print(table(("id", "status", "exit", "started", "took", "name", "output"), rows) if rows else "no jobs")


def status(
    job_id: JobId,
    address: DashboardAddress = None,
    insecure: Insecure = False,
    wait_for_dashboard: WaitForDashboard = 5.0,
    as_json: AsJson = False,
) -> None:
    """How a job stands.

    \b
    Example:
      packsvc jobs status packsvc-1f2e3d4c5b6a-1
    """
    from packsvc.run import job_status

    print_job(
        job_status(job_id, address, insecure=insecure, wait_for_dashboard=wait_for_dashboard, say=to_stderr),
        as_json=as_json,
    )


def logs(
    job_id: JobId,
    address: DashboardAddress = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
    insecure: Insecure = False,
    wait_for_dashboard: WaitForDashboard = 5.0,
    as_json: AsJson = False,
) -> None:
    """What a job has printed.

    \b
    Example:
      packsvc jobs logs packsvc-1f2e3d4c5b6a-1 --follow
    """
    from packsvc.run import job_logs

    pieces = job_logs(
        job_id, address, follow=follow, insecure=insecure, wait_for_dashboard=wait_for_dashboard, say=to_stderr
    )
    if as_json:
        print_json({"id": job_id, "logs": "".join(pieces)})
        return
    for text in pieces:
        sys.stdout.write(text)
        sys.stdout.flush()


def stop(
    job_id: JobId,
    address: DashboardAddress = None,
    insecure: Insecure = False,
    wait_for_dashboard: WaitForDashboard = 5.0,
    as_json: AsJson = False,
) -> None:
    """Stop a job. What it has committed stays; submitting it again resumes.

    \b
    Example:
      packsvc jobs stop packsvc-1f2e3d4c5b6a-1
    """
    from packsvc.run import stop_job

    found = stop_job(job_id, address, insecure=insecure, wait_for_dashboard=wait_for_dashboard, say=to_stderr)
    if as_json:
        print_json(found.to_json())
    elif found.status == "STOPPED":
        print(f"{found.id}: stopped")
    else:
        print(f"{found.id}: had ended already ({found.status})")


def print_job(job: Any, *, as_json: bool) -> None:
    """All that is known of a job."""
    if as_json:
        print_json(job.to_json())
        return
    values = {
        "status": job.status + (f", exit code {job.exit_code}" if job.exit_code is not None else ""),
        "name": job.name,
        "output": job.output,
        "started": when(job.started_at),
        "took": took(job.started_at, job.ended_at),
        "message": job.message,
        "command": job.entrypoint,
    }
    print(job.id)
    print(facts({name: value for name, value in values.items() if value}))


def when(seconds: float | None) -> str | None:
    """A moment in local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds is not None else None


def took(started_at: float | None, ended_at: float | None) -> str | None:
    """The time between two moments, the second being now where it is not known.

    >>> took(0.0, 75.4), took(None, None)
    ('1 min 15 s', None)
    """
    if started_at is None:
        return None
    whole = max(0, round((ended_at if ended_at is not None else time.time()) - started_at))
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


COMMANDS: dict[str, Callable[..., None]] = {"list": list_, "status": status, "logs": logs, "stop": stop}
for _name, _command in COMMANDS.items():
    jobs.command(_name)(through_the_door(_command))
