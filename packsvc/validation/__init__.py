"""Validation: a packed output -> a verdict on every invariant of the format.

`validator` runs `shard_check` over all shards (`shard_file` opens them with distrust, `geometry` and `masks` look
at the arrays), then `provenance`, `rejects`, `accounts` and `tables` compare what they hold with one another and
with the manifest. `against_sources` encodes the inputs afresh by the slow method and compares `digests`.
"""

from packsvc.validation.report import CHECKS, Check, Failure, Report
from packsvc.validation.validator import validate

__all__ = ["CHECKS", "Check", "Failure", "Report", "validate"]
