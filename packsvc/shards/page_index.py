"""Page index and page headers of Parquet, which pyarrow does not hand out.

They are read from their bytes in Thrift's compact protocol, many fields at a time: a field is one byte that names it
and a variable-length integer. Only the forms that Arrow's writer uses are known here. Anything else is `Unfamiliar`,
and whoever asked goes to pyarrow: it is either a foreign file or a damaged one, and pyarrow tells which.
"""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from packsvc.compiled import native
from packsvc.shards.thrift import Bytes, Unfamiliar, read_struct

_INT = rb"[\x80-\xff]{0,9}[\x00-\x7f]"
_DATA_PAGE = re.compile(
    b"\x15\x00\x15(" + _INT + b")\x15(" + _INT + b")\x15(" + _INT + b")\x1c\x15(" + _INT + b")\x15\x00\x15\x06\x15\x06"
    rb"(?:\x00\x00|\x1c)"
)
"""PageHeader of a version 1 data page with a checksum, PLAIN values and RLE levels; 1c: statistics follow."""


class PageHead(NamedTuple):
    """The header of a data page."""

    size: int
    """Of the header itself."""
    uncompressed: int
    compressed: int
    crc: int
    num_values: int


def page_locations(
    index: bytes, num_pages: int, start: int, stop: int, packs_per_page: int
) -> tuple[list[int], list[int]]:
    """First byte and size, header included, of each page that an offset index names.

    Args:
        index: The offset index.
        num_pages: How many pages there must be.
        start, stop: The bytes that they must fill, one page after the other.
        packs_per_page: How many rows each must begin after the one before it.

    Raises:
        Unfamiliar: They do otherwise, or the index has another form.
    """
    if native is not None:
        found: tuple[list[int], list[int]] | None
        found = native.page_locations(index, num_pages, start, stop, packs_per_page)
        if found is None:
            raise Unfamiliar("offset index")
        return found
    pages: Any = read_struct(index).get(1)
    try:
        offsets, sizes, rows = ([page[field] for page in pages] for field in (1, 2, 3))
    except (TypeError, KeyError):
        raise Unfamiliar("offset index") from None
    ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
    if [*offsets, stop] != [start, *ends] or rows != list(range(0, num_pages * packs_per_page, packs_per_page)):
        raise Unfamiliar("pages")
    return offsets, sizes


def page_minima(index: bytes, num_pages: int, dtype: Any) -> NDArray[np.int64]:
    """(pages,) the smallest value of each page from a column index, where it is the largest too.

    Raises:
        Unfamiliar: Pages have several values, nulls, or the index has another form.
    """
    width = np.dtype(dtype).itemsize
    if native is not None:
        found = native.page_minima(index, num_pages, width)
        if found is None:
            raise Unfamiliar("column index")
        return np.frombuffer(found, dtype=np.int64)
    place = _list_of(index, 0x19, 0x02, num_pages, other_kind=0x01)
    if any(index[place : place + num_pages].translate(None, b"\0\2")):
        raise Unfamiliar("column index")
    place += num_pages
    tables = []
    for _ in ("smallest", "largest"):
        place += _list_of(index[place:], 0x19, 0x08, num_pages)
        size = num_pages * (1 + width)
        if place + size > len(index):
            raise Unfamiliar("column index")
        tables.append(np.frombuffer(index, np.uint8, size, place).reshape(num_pages, 1 + width))
        place += size
    if (tables[0][:, 0] != width).any() or not np.array_equal(tables[0], tables[1]):
        raise Unfamiliar("column index")
    values = np.ascontiguousarray(tables[0][:, 1:]).view(np.dtype(dtype).newbyteorder("<"))
    minima: NDArray[np.int64] = values.ravel().astype(np.int64)
    return minima


def page_head(page: Bytes) -> PageHead | None:
    """The header that a page begins with; None where it has another form."""
    match = _DATA_PAGE.match(page)
    if match is None:
        return None
    uncompressed, compressed, crc, num_values = match.groups()
    size = match.end()
    if match.group().endswith(b"\x1c"):
        size = _after_statistics(page, size)
    return PageHead(size, _known(uncompressed), varint(compressed), varint(crc) & 0xFFFFFFFF, _known(num_values))


def level_blocks_end(body: Bytes) -> int:
    """Where the values begin behind the repetition and the definition levels of a page of lists."""
    first = 4 + int.from_bytes(body[:4], "little")
    return first + 4 + int.from_bytes(body[first : first + 4], "little")


def repetition_starts(body: Bytes, num_values: int) -> tuple[NDArray[np.int64], bool]:
    """First value of each list in a page, and whether every definition level is 1: no list is empty."""
    first = 4 + int.from_bytes(body[:4], "little")
    end = level_blocks_end(body)
    repetition = _levels(body[4:first], num_values)
    definition = _levels(body[first + 4 : end], num_values)
    return np.flatnonzero(repetition == 0), bool(definition.all())


def varint(raw: bytes) -> int:
    """A zigzag integer."""
    value = shift = 0
    for byte in raw:
        value |= (byte & 0x7F) << shift
        shift += 7
    return (value >> 1) ^ -(value & 1)


_known = functools.lru_cache(4096)(varint)
"""For the numbers that pages have in common."""


def _list_of(index: Bytes, field: int, kind: int, size: int, *, other_kind: int = -1) -> int:
    """Where the items of a list begin: a struct's field `field` with `size` items of a kind."""
    if len(index) < 2 or index[0] != field or index[1] & 0x0F not in (kind, other_kind):
        raise Unfamiliar("list")
    count, place = index[1] >> 4, 2
    if count == 15:
        count = shift = 0
        while True:
            if place >= len(index) or shift > 28:
                raise Unfamiliar("list")
            byte = index[place]
            place += 1
            count |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
    if count != size:
        raise Unfamiliar("list")
    return place


def _levels(block: Bytes, count: int) -> NDArray[np.uint8]:
    """Levels of 0 and 1 from Parquet's mix of runs and packed bits. Raises Unfamiliar."""
    parts, place, found = [], 0, 0
    while found < count:
        head = shift = 0
        while True:
            if place >= len(block) or shift > 28:
                raise Unfamiliar("levels")
            byte = block[place]
            place += 1
            head |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        size = head >> 1
        if head & 1:
            part = np.unpackbits(np.frombuffer(block[place : place + size], dtype=np.uint8), bitorder="little")
            place += size
        else:
            if place >= len(block) or size > count:
                raise Unfamiliar("levels")
            part = np.full(size, block[place], dtype=np.uint8)
            place += 1
        if not len(part):
            raise Unfamiliar("levels")
        parts.append(part)
        found += len(part)
    return np.concatenate(parts)[:count] if parts else np.zeros(0, dtype=np.uint8)


def _after_statistics(page: Bytes, place: int) -> int:
    """The end of a page header whose Statistics begin at `place`: binaries, integers and flags."""
    while place < len(page) and page[place]:
        kind = page[place] & 0x0F
        place += 1
        if kind in (1, 2):
            continue
        number = shift = 0
        while place < len(page):
            byte = page[place]
            place += 1
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        place += number if kind == 8 else 0
    return place + 3
