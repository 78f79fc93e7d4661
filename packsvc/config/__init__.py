"""What a job is: job file or keyword arguments -> checked `PackJob`. Pydantic and YAML only."""

from packsvc.config.job import (
    ControlTokens,
    DroppedReasoning,
    Format,
    Limits,
    Overlong,
    Packing,
    PackJob,
    Source,
    Strategy,
    TrainOn,
    Turns,
    is_url,
    parse_size,
)
from packsvc.config.load import load_job, parse_job, parse_set
from packsvc.config.writing import job_text

__all__ = [
    "ControlTokens",
    "DroppedReasoning",
    "Format",
    "Limits",
    "Overlong",
    "PackJob",
    "Packing",
    "Source",
    "Strategy",
    "TrainOn",
    "Turns",
    "is_url",
    "job_text",
    "load_job",
    "parse_job",
    "parse_set",
    "parse_size",
]
