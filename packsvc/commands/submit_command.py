"""`packsvc submit`: run a job on a Ray cluster, through its job API."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from packsvc.commands.door import leave
from packsvc.commands.options import AsJson
from packsvc.commands.printing import print_json, size
from packsvc.errors import ClusterError, ConfigError

DashboardAddress = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="URL",
        help="The cluster's dashboard, http://HOST:8265; default: RAY_API_SERVER_ADDRESS, else this machine's.",
    ),
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Allow http to another machine without a token.")]
WaitForDashboard = Annotated[
    float,
    typer.Option("--wait-for-dashboard", min=0, metavar="SECONDS", help="How long to wait for the first answer."),
]


def submit(
    job_file: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job file.")],
    address: DashboardAddress = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Follow the logs on stderr, and end with the job's exit code.")
    ] = False,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a key: dotted path and YAML value; may repeat."),
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="OUT", help="Where to write, instead of the job's output.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, metavar="N", help="At most N rows of each source, into OUT-limit-N: a trial."),
    ] = None,
    ship_inputs: Annotated[
        bool, typer.Option("--ship-inputs", help="Let local inputs travel with the job, 100 MB in all at most.")
    ] = False,
    local_paths_ok: Annotated[
        bool,
        typer.Option("--local-paths-ok", help="All nodes see this machine's files under the same paths."),
    ] = False,
    environment: Annotated[
        list[str] | None,
        typer.Option(
            "--env",
            metavar="NAME[=VALUE]",
            help="A variable for the job, by default with its value here; may repeat. The cluster's users can see it.",
        ),
    ] = None,
    python: Annotated[
        str | None,
        typer.Option("--python", metavar="PATH", help="The cluster's Python; default: `python` on its path."),
    ] = None,
    submission_id: Annotated[
        str | None,
        typer.Option("--submission-id", metavar="ID", help="An id to use instead of packsvc-<hash>-<attempt>."),
    ] = None,
    insecure: Insecure = False,
    wait_for_dashboard: WaitForDashboard = 20.0,
    as_json: AsJson = False,
) -> None:
    """Run a job on a Ray cluster, and print the submission id. The same job again resumes.

    The job file, the chat template and the tokenizer's files travel with it. A path that the cluster cannot see is
    refused before anything is sent. The token is RAY_AUTH_TOKEN, or the one in Ray's token file.

    \b
    Examples:
      packsvc submit job.yaml --address http://127.0.0.1:8265 --wait
      packsvc submit job.yaml --address https://ray.example --set output=s3://bucket/out --ship-inputs
      packsvc submit job.yaml --env AWS_PROFILE --limit 1000
    """
    from packsvc.config import is_url, load_job, parse_set
    from packsvc.run import submit_job

    changes = parse_set(overrides or [])
    if output is not None:
        changes["output"] = output if is_url(output) else os.path.abspath(output)
    submission = submit_job(
        load_job(job_file, changes),
        address=address,
        ship_inputs=ship_inputs,
        local_paths_ok=local_paths_ok,
        insecure=insecure,
        submission_id=submission_id,
        limit=limit,
        environment=_variables(environment or []),
        python=python,
        wait_for_dashboard=wait_for_dashboard,
        say=to_stderr,
    )
    if submission.was_running:
        to_stderr(f"this job was submitted before and has not ended; nothing new was started for {submission.output}")
    elif submission.shipped_files:
        to_stderr(f"sent the job with {submission.shipped_files} files, {size(submission.shipped_bytes)}")
    if wait:
        _wait(submission, address=address, insecure=insecure, as_json=as_json)
    elif as_json:
        print_json(submission.to_json())
    else:
        print(submission.id)


def _wait(submission: Any, *, address: str | None, insecure: bool, as_json: bool) -> None:
    from packsvc.run import job_logs, job_status

    if not as_json:
        print(submission.id, flush=True)
    try:
        for text in job_logs(submission.id, address, follow=True, insecure=insecure, wait_for_dashboard=20.0):
            sys.stderr.write(text)
            sys.stderr.flush()
        ended = job_status(submission.id, address, insecure=insecure, wait_for_dashboard=20.0)
    except KeyboardInterrupt:
        leave(
            f"no longer waiting; the job goes on. `packsvc jobs logs {submission.id} --follow` watches it, "
            f"`packsvc jobs stop {submission.id}` ends it",
            ClusterError.exit_code,
        )
    if as_json:
        print_json({**submission.to_json(), "job": ended.to_json()})
    to_stderr(f"{ended.id}: {ended.status}" + (f": {ended.message}" if ended.status != "SUCCEEDED" else ""))
    if ended.command_exit_code:
        raise typer.Exit(ended.command_exit_code)


def _variables(items: list[str]) -> dict[str, str]:
    """`NAME=VALUE`, or `NAME` for its value here."""
    found = {}
    for item in items:
        name, sign, value = item.partition("=")
        if not sign:
            if name not in os.environ:
                raise ConfigError(f"--env {name}: is not set here; write {name}=VALUE")
            value = os.environ[name]
        found[name] = value
    return found


def to_stderr(text: str) -> None:
    """What is not a result."""
    print(text, file=sys.stderr, flush=True)
