"""The counting pass: rows, uncompressed bytes, content hash, and the places where an input can be cut.

One streaming pass in bounded memory. JSON lines are counted by their newlines, without parsing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from packsvc.sources.arrays import elements
from packsvc.sources.columnar import footer_hash, open_columnar
from packsvc.sources.lines import is_blank
from packsvc.sources.opening import (
    BOM,
    Compression,
    Container,
    InputHandle,
    Shape,
    blocks,
    check_empty,
    open_input,
    sniff,
)
from packsvc.sources.tables import csv_rows
from packsvc.types import InputFile, PieceKind

COUNT_BLOCK_BYTES = 8 << 20
FEW_MARKS = 256
"""An input with more marks than this gets them twice as far apart, up to the widest stride."""
WIDEST_STRIDE = 4096
_COLUMNAR = (Container.PARQUET, Container.ARROW_FILE, Container.ARROW_STREAM)
_BLANK = np.zeros(256, dtype=np.bool_)
_BLANK[[9, 10, 11, 12, 13, 32]] = True


class Mark(NamedTuple):
    """A place between two rows."""

    row: int
    """Number of the row after it (line number in JSONL)."""
    offset: int
    """Uncompressed bytes before it."""
    num_rows: int
    """Rows before it: fewer than `row` where lines are blank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputCount:
    """What the counting pass found in one input."""

    num_rows: int
    """Records; blank lines are none."""
    content_hash: str
    """sha256 of the bytes (Parquet: of the footer)."""
    size_bytes: int
    """Uncompressed."""
    kind: PieceKind
    """How the input is cut where it must be: BYTES, ROWS or RECUT."""
    marks: tuple[Mark, ...]
    """Sorted; the first is (0, 0, 0), the last the end."""


def count_input(
    file: InputFile, *, storage_options: Mapping[str, Any] | None = None, max_rows: int | None = None
) -> InputCount:
    """Count one input.

    Args:
        max_rows: Rows of the pieces that will be cut at most; the marks are made close enough for those. By
            default they are at most 4,096 rows apart.

    Raises:
        SourceError: Missing, truncated, corrupt; the message names the file.
    """
    stride = WIDEST_STRIDE if max_rows is None else max(1, max_rows // 4)
    with open_input(file, storage_options) as handle:
        if handle.seek(0, 2) == 0:
            return _empty(file)
        shape = sniff(handle, file)
    if shape.container in _COLUMNAR:
        return _count_columnar(file, shape, storage_options)
    with open_input(file, storage_options, hashed=True) as handle:
        size_bytes, marks = _scan(handle, shape, file, stride=stride)
        plain = shape == Shape(compression=Compression.NONE, container=Container.JSONL)
        return InputCount(
            num_rows=marks[-1].num_rows,
            content_hash=handle.digest(),
            size_bytes=size_bytes,
            kind=PieceKind.BYTES if plain else PieceKind.RECUT,
            marks=marks,
        )


def content_hash(file: InputFile, *, storage_options: Mapping[str, Any] | None = None) -> str:
    """What `count_input` gives as the content hash, without counting."""
    with open_input(file, storage_options) as handle:
        if handle.seek(0, 2) and sniff(handle, file) == Shape(
            compression=Compression.NONE, container=Container.PARQUET
        ):
            return footer_hash(handle)
    with open_input(file, storage_options, hashed=True) as handle:
        return handle.digest()


def _empty(file: InputFile) -> InputCount:
    check_empty(file)
    nothing = hashlib.sha256().hexdigest()
    return InputCount(num_rows=0, content_hash=nothing, size_bytes=0, kind=PieceKind.RECUT, marks=(Mark(0, 0, 0),))


def _count_columnar(file: InputFile, shape: Shape, storage_options: Mapping[str, Any] | None) -> InputCount:
    marks = [Mark(0, 0, 0)]
    with open_input(file, storage_options) as handle:
        for num_rows, num_bytes in open_columnar(handle, shape).marks():
            last = marks[-1]
            if num_rows:
                marks.append(Mark(last.row + num_rows, last.offset + num_bytes, last.num_rows + num_rows))
    return InputCount(
        num_rows=marks[-1].num_rows,
        content_hash=content_hash(file, storage_options=storage_options),
        size_bytes=marks[-1].offset,
        kind=PieceKind.ROWS,
        marks=tuple(marks),
    )


def _scan(handle: InputHandle, shape: Shape, file: InputFile, *, stride: int) -> tuple[int, tuple[Mark, ...]]:
    if shape.container is Container.JSONL:
        lines = LineCounter(widest_stride=stride)
        for block in blocks(handle, shape.compression, size=COUNT_BLOCK_BYTES):
            lines.add(block)
        return lines.offset, lines.finish()
    size = _Sized(blocks(handle, shape.compression))
    marker = _Marker(widest_stride=stride)
    if shape.container is Container.JSON_ARRAY:
        for element in elements(size, name=file):
            marker.add(len(element.data) + 2)
    else:
        for row in csv_rows(size, file=0, name=file):
            marker.add(sum(map(len, row.record.values())) if row.record else len(row.raw or ""))
    return size.num_bytes, marker.finish(size.num_bytes)


class _Sized:
    """Blocks, counted as they pass."""

    def __init__(self, parts: Iterable[bytes]) -> None:
        self._parts = parts
        self.num_bytes = 0

    def __iter__(self) -> Iterator[bytes]:
        for part in self._parts:
            self.num_bytes += len(part)
            yield part


class _Marker:
    """Marks between records that come one at a time, of about known size."""

    def __init__(self, *, widest_stride: int) -> None:
        self._marks = _Marks(widest_stride=widest_stride)
        self._row = 0
        self._offset = 0
        self._since = 0

    def add(self, num_bytes: int) -> None:
        far = self._since + num_bytes > COUNT_BLOCK_BYTES
        self._marks.add(Mark(self._row, self._offset, self._row), keep=far)
        self._since = num_bytes if far else self._since + num_bytes
        self._row += 1
        self._offset += num_bytes

    def finish(self, num_bytes: int) -> tuple[Mark, ...]:
        return self._marks.finish(Mark(self._row, max(num_bytes, self._offset), self._row))


class _Marks:
    """Marks at every `stride`-th row, the stride doubled while they are many, and those to keep anyway."""

    def __init__(self, *, widest_stride: int) -> None:
        self.stride = 1
        self._widest = widest_stride
        self._regular: list[Mark] = []
        self._kept: set[Mark] = {Mark(0, 0, 0)}

    def add(self, mark: Mark, *, keep: bool) -> None:
        if keep:
            self._kept.add(mark)
        if mark.row % self.stride == 0:
            self._regular.append(mark)
            if len(self._regular) > FEW_MARKS and self.stride * 2 <= self._widest:
                self.stride *= 2
                self._regular = [m for m in self._regular if m.row % self.stride == 0]

    def finish(self, end: Mark) -> tuple[Mark, ...]:
        return tuple(sorted({*self._regular, *self._kept, end}))


class LineCounter:
    """Counts lines and rows of blocks, with a mark at the first and the last line start of each block besides
    the regular ones: between two marks lies one line, or no more than a block."""

    def __init__(self, *, widest_stride: int = WIDEST_STRIDE) -> None:
        self.offset = 0
        self._line = 0
        self._num_rows = 0
        self._open_has_text = False
        self._open = False
        self._marks = _Marks(widest_stride=widest_stride)

    def add(self, block: bytes) -> None:
        """Count one block; lines may run on from block to block."""
        data = np.frombuffer(block, dtype=np.uint8)
        skip = len(BOM) if self.offset == 0 and block.startswith(BOM) else 0
        ends = np.flatnonzero(data == 10)
        starts = np.concatenate(([skip], ends + 1))
        has_text = self._has_text(block, data, starts, ends)
        has_text[0] |= self._open_has_text
        if len(ends):
            rows_before = self._num_rows + np.cumsum(has_text[:-1])
            self._mark(starts[1:], rows_before, len(block))
            self._line += len(ends)
            self._num_rows = int(rows_before[-1])
        self._open_has_text = bool(has_text[-1])
        self._open = len(ends) == 0 or int(starts[-1]) < len(block)
        self.offset += len(block)

    def _has_text(
        self, block: bytes, data: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """For each line or part of one in the block, whether it is more than white space."""
        inside = starts < len(block)
        out = np.zeros(len(starts), dtype=np.bool_)
        out[inside] = ~_BLANK[data[starts[inside]]]
        stops = np.concatenate((ends, [len(block)]))
        for index in np.flatnonzero(~out & (stops > starts)):
            out[index] = not is_blank(block[starts[index] : stops[index]])
        return out

    def _mark(self, starts: NDArray[np.int64], rows_before: NDArray[np.int64], size: int) -> None:
        """Marks at the line starts of this block, all but the very end of the input among them."""
        lines = self._line + 1 + np.arange(len(starts))
        chosen = np.flatnonzero(lines % self._marks.stride == 0)
        ends = {0, len(starts) - 1}
        for index in sorted({*chosen.tolist(), *ends}):
            mark = Mark(int(lines[index]), self.offset + int(starts[index]), int(rows_before[index]))
            self._marks.add(mark, keep=index in ends)

    def finish(self) -> tuple[Mark, ...]:
        """All marks, the end last."""
        rows = self._num_rows + int(self._open_has_text)
        return self._marks.finish(Mark(self._line + int(self._open), self.offset, rows))
