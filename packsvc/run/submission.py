"""Hand a job to a cluster, through Ray's job API.

A submission is named `packsvc-<hash of the resolved job>-<attempt>`. Submitting the same job again is a resume: a
new attempt, which skips what is committed, when the earlier one has ended; the running one, and no second, while
it has not. The truth of a run is in its output, so nothing here keeps state. Waiting for a job survives lost
connections: the logs are followed again from where they broke off.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from packsvc.config import PackJob, load_job
from packsvc.errors import ClusterError, ConfigError
from packsvc.run.cluster_jobs import (
    ClusterJob,
    Say,
    all_jobs,
    checked_id,
    follow_logs,
    is_known,
    look_up,
    tell,
)
from packsvc.run.dashboard import FIRST_NODE_SECONDS, Dashboard, open_dashboard
from packsvc.run.shipping import LocalPaths, Package, job_hash, make_package

PREFIX = "packsvc"
WAIT_FOR_DASHBOARD_SECONDS = 20.0
POLL_SECONDS = 0.5
RACES = 5
PASSED_ON = (
    "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "HF_ENDPOINT", "HF_HUB_DOWNLOAD_TIMEOUT",
    "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION",
    "AWS_REQUEST_CHECKSUM_CALCULATION", "AWS_RESPONSE_CHECKSUM_VALIDATION",
    "GOOGLE_CLOUD_PROJECT", "AZURE_STORAGE_ACCOUNT_NAME", "STORAGE_EMULATOR_HOST",
)  # fmt: skip
"""Variables of this process that a job gets too. No secret is among them: a cluster shows what a job was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What a submit did."""

    id: str
    attempt: int | None
    """None under an id that the user chose."""
    address: str
    output: str
    was_running: bool
    """It was submitted before and has not ended; nothing new was started."""
    shipped_files: int = 0
    shipped_bytes: int = 0
    ended: ClusterJob | None = None
    """With `wait`: how it ended."""

    def to_json(self) -> dict[str, Any]:
        tree = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "ended"}
        return {**tree, "job": self.ended.to_json()} if self.ended is not None else tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to submit and how; see `submit_job`."""

    job: PackJob
    ship_inputs: bool = False
    local_paths: LocalPaths = LocalPaths.UNKNOWN
    submission_id: str | None = None
    limit: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    python: str | None = None


def submit_job(
    job: PackJob | str | os.PathLike[str],
    *,
    address: str | None = None,
    wait: bool = False,
    ship_inputs: bool = False,
    local_paths_ok: bool = False,
    insecure: bool = False,
    submission_id: str | None = None,
    limit: int | None = None,
    environment: Mapping[str, str] | None = None,
    python: str | None = None,
    wait_for_dashboard: float = WAIT_FOR_DASHBOARD_SECONDS,
    say: Say = tell,
) -> Submission:
    """Run a job on a cluster: `packsvc pack` there, with the cluster's workers.

    Args:
        job: A job, or the path of a job file.
        address: URL of the cluster's dashboard; RAY_API_SERVER_ADDRESS, else http://127.0.0.1:8265, when None.
        wait: Follow the logs, each piece through `say`, until the job has ended.
        ship_inputs: Let small local inputs travel with the job.
        local_paths_ok: The cluster sees this machine's files: leave local paths as they are.
        insecure: Allow plain http to another machine without a token.
        submission_id: An id instead of `packsvc-<hash>-<attempt>`.
        limit: As of `pack`.
        environment: Variables for the job, besides those of `PASSED_ON`; the cluster shows them to its users.
        python: The cluster's Python; `python`, or this one where the cluster is this machine.
        wait_for_dashboard: Seconds to wait for the cluster's first answer.
        say: Gets what there is to tell.

    Raises:
        ConfigError: The job, a path that the cluster cannot see, the address, the token, or an id that is taken.
        ClusterError: No answer from the cluster.
    """
    request = Request(
        job=job if isinstance(job, PackJob) else load_job(job),
        ship_inputs=ship_inputs,
        local_paths=LocalPaths.SHARED if local_paths_ok else LocalPaths.UNKNOWN,
        submission_id=submission_id,
        limit=limit,
        environment=dict(environment or {}),
        python=python,
    )
    _check_before_asking(request)
    dashboard = open_dashboard(address, insecure=insecure, wait_seconds=wait_for_dashboard, say=say)
    submission = _submit(dashboard, request, deadline=time.monotonic() + max(wait_for_dashboard, FIRST_NODE_SECONDS))
    if not wait:
        return submission
    for text in follow_logs(dashboard, submission.id):
        say(text.rstrip("\n"))
    fields = {name: getattr(submission, name) for name in submission.__dataclass_fields__}
    return Submission(**{**fields, "ended": look_up(dashboard, submission.id)})


# ---- submitting


def _check_before_asking(request: Request) -> None:
    """What is wrong whatever the cluster: refused at once, and without waiting for a dashboard."""
    if request.submission_id is not None:
        checked_id(request.submission_id)
    make_package(
        request.job, ship_inputs=request.ship_inputs, local_paths=request.local_paths, same_machine=lambda: True
    )


def _submit(dashboard: Dashboard, request: Request, *, deadline: float) -> Submission:
    here: list[bool] = []

    def same_machine() -> bool:
        if not here:
            here.append(dashboard.is_this_machine())
        return here[0]

    package = make_package(
        request.job, ship_inputs=request.ship_inputs, local_paths=request.local_paths, same_machine=same_machine
    )
    digest = job_hash(package.job, limit=request.limit)
    python = request.python or _python(dashboard, same_machine)
    for _ in range(RACES):
        earlier = all_jobs(dashboard)
        if request.submission_id is not None:
            new, attempt = request.submission_id, None
            _refuse_taken(dashboard, new, earlier)
        else:
            attempts = _attempts(earlier, digest)
            for job in attempts.values():
                if not job.is_over:
                    return _submission(dashboard, job.id, package, request, attempt=None, was_running=True)
            attempt = max(attempts, default=0) + 1
            new = f"{PREFIX}-{digest}-{attempt}"
        with tempfile.TemporaryDirectory(prefix="packsvc-") as folder:
            package.write(folder)
            sent = {
                "entrypoint": _entrypoint(package, python, request.limit),
                "submission_id": new,
                "runtime_env": {"working_dir": folder, "env_vars": _environment(request.environment)},
                "metadata": _metadata(package, digest, attempt),
            }
            failure = _send(dashboard, sent, deadline=deadline)
        if failure is None:
            return _submission(dashboard, new, package, request, attempt=attempt, was_running=False)
        if not is_known(dashboard, new):
            raise failure
        # Somebody took the id in between: theirs is the running one, or, under a chosen id, in the way.
    raise ClusterError(f"{dashboard.address}: others submit the same job all the time; `packsvc jobs list` shows them")


def _send(dashboard: Dashboard, sent: Mapping[str, Any], *, deadline: float) -> Exception | None:
    """Submit; a cluster that has just started has no agent for jobs yet and is asked again for a while."""
    while True:
        try:
            dashboard.client.submit_job(**sent)
            return None
        except Exception as error:
            if "No available agent" in str(error) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
                continue
            return dashboard.told(f"submission of {sent['submission_id']}", error)


def _submission(
    dashboard: Dashboard, new: str, package: Package, request: Request, *, attempt: int | None, was_running: bool
) -> Submission:
    output = package.job.output_url + (f"-limit-{request.limit}" if request.limit is not None else "")
    shipped = (0, 0) if was_running else (len(package.files), package.size_bytes)
    if was_running:
        attempt = int(new.rpartition("-")[2])
    return Submission(
        id=new,
        attempt=attempt,
        address=dashboard.address,
        output=output,
        was_running=was_running,
        shipped_files=shipped[0],
        shipped_bytes=shipped[1],
    )


def _entrypoint(package: Package, python: str, limit: int | None) -> str:
    words = [python, "-m", "packsvc", "pack", package.job_name, "--address", "auto"]
    if package.base is not None:
        words += ["--base", package.base]
    if limit is not None:
        words += ["--limit", str(limit)]
    return shlex.join(words)


def _python(dashboard: Dashboard, same_machine: Callable[[], bool]) -> str:
    """This Python where the cluster surely has it, since `python` may be another, or none, in its shell."""
    import ray

    return sys.executable if dashboard.ray_version == ray.__version__ and same_machine() else "python"


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    passed = {name: os.environ[name] for name in PASSED_ON if os.environ.get(name)}
    # The driver sets variables for its workers too; without this Ray refuses to set one in both places.
    return {"RAY_OVERRIDE_JOB_RUNTIME_ENV": "1", "PYTHONUNBUFFERED": "1", **passed, **given}


def _metadata(package: Package, digest: str, attempt: int | None) -> dict[str, str]:
    tree = {
        "packsvc_version": version("packsvc"),
        "name": package.job.name,
        "job_hash": digest,
        "output": package.job.output_url,
    }
    return tree if attempt is None else {**tree, "attempt": str(attempt)}


def _attempts(jobs: Sequence[ClusterJob], digest: str) -> dict[int, ClusterJob]:
    pattern = re.compile(rf"{PREFIX}-{digest}-(\d+)")
    return {int(match[1]): job for job in jobs if (match := pattern.fullmatch(job.id))}


def _refuse_taken(dashboard: Dashboard, new: str, jobs: Sequence[ClusterJob]) -> None:
    for job in jobs:
        if job.id == new:
            raise ConfigError(
                f"submission id {new!r} is taken at {dashboard.address} ({job.status}, {job.name or job.entrypoint}); "
                f"choose another, or leave it out: then packsvc numbers the attempts of a job"
            )
