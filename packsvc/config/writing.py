"""A checked job back to the text of a job file."""

from __future__ import annotations

import yaml

from packsvc.config.job import PackJob


def job_text(job: PackJob) -> str:
    """A job file that says the same, every key written out; paths stay as they are."""
    text: str = yaml.safe_dump(job.dump(), sort_keys=False, allow_unicode=True)
    return text
