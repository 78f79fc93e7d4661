"""Drives the stages: job -> plan.json -> groups (read, encode, pack, write, commit) -> manifest.

`planning` lists, counts, cuts and deals the inputs; `group` is the pure function of one group; `executors` run
it in this process or on Ray; `driver` resumes and retries; `finish` sums the commits and writes the manifest.
"""

from packsvc.run.again import overlong_before, repack
from packsvc.run.cleaning import Cleaned, clean
from packsvc.run.driver import pack
from packsvc.run.dry import DryRun, dry_run
from packsvc.run.planfile import Plan
from packsvc.run.progress import Event, Progress

__all__ = ["Cleaned", "DryRun", "Event", "Plan", "Progress", "clean", "dry_run", "overlong_before", "pack", "repack"]
