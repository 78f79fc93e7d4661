"""What every format says of itself, and what it is told of the output it comes from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from packsvc.export.segments import Segments
from packsvc.shards import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The part of an output that one folder of the destination is made from."""

    manifest: Manifest
    split: str
    num_shards: int
    pad_to_multiple: int = 1
    eos_id: int | None = None


class Format(Protocol):
    """How one split of an output looks to another trainer. A new one is made for each split."""

    def __init__(self, source: Source) -> None: ...

    def write(self, chunks: Iterable[Segments], *, number: int, folder: Path) -> Iterator[Path]:
        """Write the files of one shard into a scratch folder; each has its final name.

        Args:
            chunks: The shard, a row group at a time.
            number: Of the shard in the split, from 0.
            folder: Empty, on the local disk.
        """
        ...

    def extra_files(self) -> dict[str, bytes]:
        """Small files that stand beside the others, by name; asked for when all shards are written."""
        ...

    def notes(self) -> list[str]:
        """What a reader of these files must know or set."""
        ...
