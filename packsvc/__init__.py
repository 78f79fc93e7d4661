"""packsvc: packs instruction data into fixed-length training sequences with exact masks, and proves it.

    job = packsvc.load_job("job.yaml")
    manifest = packsvc.pack(job)
    report = packsvc.validate(job.output_url)
    for batch in packsvc.PackStream(job.output_url):
        loss = model(**batch.hf()).loss

Nothing heavy is imported until it is used: `import packsvc` loads neither ray, torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from packsvc.config import PackJob, load_job
    from packsvc.run import pack, repack
    from packsvc.shards import Manifest
    from packsvc.statistics import query, stats
    from packsvc.stream import PackedBatch, PackStream
    from packsvc.validation import validate

__version__ = "0.1.0"

_HOMES = {
    "Manifest": "packsvc.shards",
    "PackJob": "packsvc.config",
    "PackStream": "packsvc.stream",
    "PackedBatch": "packsvc.stream",
    "load_job": "packsvc.config",
    "pack": "packsvc.run",
    "query": "packsvc.statistics",
    "repack": "packsvc.run",
    "stats": "packsvc.statistics",
    "validate": "packsvc.validation",
}
_ROOMS = (
    "attention",
    "config",
    "encode",
    "errors",
    "export",
    "plan",
    "probe",
    "shards",
    "sources",
    "statistics",
    "stream",
    "testing",
    "trainers",
    "validation",
)

__all__ = [
    "Manifest",
    "PackJob",
    "PackStream",
    "PackedBatch",
    "load_job",
    "pack",
    "query",
    "repack",
    "stats",
    "validate",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _ROOMS:
        return importlib.import_module(f"packsvc.{name}")
    raise AttributeError(f"module 'packsvc' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, *_ROOMS])
