"""The footer of a shard, read for its pages: what pyarrow tells too, but several milliseconds later.

Nothing is believed on its word: pages must lie as the page index says, and carry their own checksums and counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from packsvc.shards.thrift import Unfamiliar, read_struct

MAGIC = b"PAR1"
TAIL_BYTES = 8
"""At the end of a file: the size of the footer before them, and `MAGIC`."""
_OPTIONAL, _REPEATED = 1, 2
_DEEPEST = 8
Span = tuple[int, int]
"""First byte and length."""


class Leaf(NamedTuple):
    """A column as the schema has it."""

    path: tuple[bytes, ...]
    physical: int
    """Its type, by Parquet's numbers."""
    definition: int
    """The highest level."""
    repetition: int


class Chunk(NamedTuple):
    """One column of one row group."""

    codec: int
    """By Parquet's numbers."""
    pages: Span
    offset_index: Span | None
    column_index: Span | None


@dataclass(frozen=True, slots=True)
class Footer:
    """What the FileMetaData of a Parquet file says."""

    metadata: dict[str, str]
    """Keys and values."""
    num_rows: int
    group_rows: list[int]
    """Rows of each row group."""
    leaves: list[Leaf]
    _groups: list[Any]

    @classmethod
    def read(cls, data: bytes) -> Footer:
        """From its bytes. Raises Unfamiliar."""
        fields = read_struct(data, levels=2)  # columns of row groups are left as bytes, since not all are asked for
        try:
            metadata = as_text((pair[1], pair.get(2, b"")) for pair in fields.get(5, ()))
            elements = iter(fields[2])
            leaves = list(_leaves(elements, next(elements)[5], (), 0, 0))
            groups = fields[4]
            rows = [_number(group[3]) for group in groups]
            complete = all(len(group[1]) == len(leaves) for group in groups) and next(elements, None) is None
        except (KeyError, IndexError, TypeError, AttributeError, ValueError, StopIteration):
            raise Unfamiliar("footer") from None
        if not complete or sum(rows) != fields[3]:
            raise Unfamiliar("footer")
        return cls(metadata, fields[3], rows, leaves, groups)

    def chunk(self, group: int, column: int) -> Chunk:
        """A column of a row group. Raises Unfamiliar where it is in another file, has a dictionary, or is no column."""
        try:
            fields = read_struct(self._groups[group][1][column])
            about = fields[3]
            if 1 in fields or 11 in about or tuple(about[3]) != self.leaves[column].path:
                raise Unfamiliar("column chunk")
            pages = _number(about[9]), _number(about[7])
            return Chunk(_number(about[4]), pages, _span(fields, 4), _span(fields, 6))
        except (KeyError, IndexError, TypeError, ValueError):
            raise Unfamiliar("column chunk") from None


def as_text(pairs: Iterable[tuple[Any, Any]]) -> dict[str, str]:
    """File metadata from its bytes, whatever they hold. Raises TypeError where they are none."""
    return {str(key, "utf-8", "replace"): str(value, "utf-8", "replace") for key, value in pairs}


def _span(fields: dict[int, Any], name: int) -> Span | None:
    return (_number(fields[name]), _number(fields[name + 1])) if name in fields else None


def _number(value: Any) -> int:
    """An integer from 0 on; everything else is a ValueError."""
    if type(value) is not int or value < 0:
        raise ValueError(value)
    return value


def _leaves(
    elements: Iterator[Any], count: int, path: tuple[bytes, ...], definition: int, repetition: int
) -> Iterator[Leaf]:
    """The columns below a part of the schema that has `count` children. Raises ValueError where they end before."""
    if len(path) > _DEEPEST:
        raise ValueError("a schema this deep")
    for _ in range(count):
        element = next(elements, None)
        if element is None:
            raise ValueError("columns are missing")
        here, is_repeated = (*path, element[4]), element[3] == _REPEATED
        levels = definition + (is_repeated or element[3] == _OPTIONAL), repetition + is_repeated
        if children := element.get(5):
            yield from _leaves(elements, children, here, *levels)
        else:
            yield Leaf(here, element[1], *levels)
