"""Validation: a packed output -> a verdict on every invariant of the format.

`validator` runs `shard_check` over all shards (`shard_file` opens them with distrust, `geometry` and `masks` look
at the arrays), then `provenance`, `rejects`, `accounts` and `tables` compare what they hold with one another and
with the manifest. `against_sources` encodes the inputs afresh by the slow method and compares `digests`. `verdict`
keeps a report beside the manifest.
"""

from packsvc.validation.report import CHECKS, Check, Failure, Report
from packsvc.validation.validator import validate
from packsvc.validation.verdict import VERDICT, StoredVerdict, load_verdict, save_verdict

__all__ = [
    "CHECKS",
    "VERDICT",
    "Check",
    "Failure",
    "Report",
    "StoredVerdict",
    "load_verdict",
    "save_verdict",
    "validate",
]
