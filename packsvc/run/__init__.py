"""Drives the stages: job -> plan.json -> groups (read, encode, pack, write, commit) -> manifest.

`planning` lists, counts, cuts and deals the inputs; `group` is the pure function of one group; `executors` run
it in this process or on Ray; `driver` resumes and retries; `finish` sums the commits and writes the manifest.
`submission` hands a job to a cluster, where all this happens, and `shipping` packs what travels with it.
"""

from packsvc.run.again import overlong_before, repack
from packsvc.run.cleaning import Cleaned, clean
from packsvc.run.cluster_jobs import ClusterJob, job_logs, job_status, list_jobs, stop_job
from packsvc.run.driver import pack
from packsvc.run.dry import DryRun, dry_run
from packsvc.run.planfile import Plan
from packsvc.run.progress import Event, Progress
from packsvc.run.submission import Submission, submit_job

__all__ = [
    "Cleaned",
    "ClusterJob",
    "DryRun",
    "Event",
    "Plan",
    "Progress",
    "Submission",
    "clean",
    "dry_run",
    "job_logs",
    "job_status",
    "list_jobs",
    "overlong_before",
    "pack",
    "repack",
    "stop_job",
    "submit_job",
]
