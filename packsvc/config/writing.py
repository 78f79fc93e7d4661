"""A checked job back to the text of a job file."""

from __future__ import annotations

import yaml

from packsvc.config.job import PackJob


def job_text(job: PackJob) -> str:
    """A job file that says the same, every key written out; paths stay as they are."""
    # Escapes only: written as it is, some line break of Unicode (U+0085) would be read back as a space.
    text: str = yaml.safe_dump(job.dump(), sort_keys=False, allow_unicode=False)
    return text
