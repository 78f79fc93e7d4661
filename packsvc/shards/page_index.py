"""The few structures of Parquet that pyarrow does not hand out: page index and page headers.

They are read from their bytes in Thrift's compact protocol, many at a time: a field is one byte that names it and a
variable-length integer. Only the forms that Arrow's writer uses are known here. Anything else is `Unfamiliar`, and
whoever asked goes to pyarrow: it is either a foreign file or a damaged one, and pyarrow tells which.
"""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from packsvc.compiled import native

Bytes = bytes | memoryview
_INT = rb"[\x80-\xff]{0,9}[\x00-\x7f]"
_CHUNK_END = re.compile(b"\x00\x16(" + _INT + b")\x15(" + _INT + b")(?:\x16(" + _INT + b")\x15(" + _INT + b"))?\x00")
"""Fields 4 to 7 of a ColumnChunk, after the struct of field 3: where its offset index and its column index are."""
_DATA_PAGE = re.compile(
    b"\x15\x00\x15(" + _INT + b")\x15(" + _INT + b")\x15(" + _INT + b")\x1c\x15(" + _INT + b")\x15\x00\x15\x06\x15\x06"
    rb"(?:\x00\x00|\x1c)"
)
"""PageHeader of a version 1 data page with a checksum, PLAIN values and RLE levels; 1c: statistics follow."""
_LOCATION = (0x16, 0x15, 0x16, 0x00)
"""What stands around the three numbers of a PageLocation."""


class Unfamiliar(Exception):
    """Not a form that is read here; pyarrow may know it."""


class IndexPlace(NamedTuple):
    """Where the indexes of one column chunk are in the file."""

    offset_index: tuple[int, int]
    """First byte and length."""
    column_index: tuple[int, int] | None
    """None where the column has no statistics."""


class PageHead(NamedTuple):
    """The header of a data page."""

    size: int
    """Of the header itself."""
    uncompressed: int
    compressed: int
    crc: int
    num_values: int


def index_places(footer: Bytes, footer_start: int, num_chunks: int) -> list[IndexPlace]:
    """Where the indexes of all column chunks are, in the order of the footer.

    The footer is searched, not parsed. What is found is believed only where it accounts for every chunk and where
    the offset indexes fill the file up to the footer, without a gap, after the column indexes.

    Args:
        footer: The FileMetaData.
        footer_start: Where it begins in the file.
        num_chunks: Row groups times columns.

    Raises:
        Unfamiliar: There is no page index, or it lies otherwise.
    """
    parts = [part for match in _CHUNK_END.findall(footer) for part in match]
    raw = np.frombuffer(b"".join([part or b"\0" for part in parts]), dtype=np.uint8)
    numbers = (_varints(raw, np.flatnonzero(raw < 0x80)) >> 1).reshape(-1, 4).tolist()
    places = [IndexPlace((a, b), (c, d) if c else None) for a, b, c, d in numbers]
    columns = [place.column_index for place in places if place.column_index is not None]
    spans = columns + [place.offset_index for place in places]
    ends = [start + length for start, length in spans]
    follow = all(end == start for end, (start, _) in zip(ends, spans[1:], strict=False))
    if len(places) != num_chunks or not spans or ends[-1] != footer_start or not follow:
        raise Unfamiliar("page index")
    return places


def chunk_codecs(footer: Bytes, column: str, num_groups: int) -> list[int]:
    """The codec of a list column in each row group, by Parquet's numbers.

    pyarrow gives it too, but aborts the process where the number is none that it knows.

    Raises:
        Unfamiliar: The footer does not name the column as often as there are row groups.
    """
    parts = [column.encode(), b"list", b"element"]
    path = b"\x19\x38" + b"".join(bytes([len(part)]) + part for part in parts) + b"\x15"
    found = re.findall(re.escape(path) + b"([\x00-\x7f])", footer)
    if len(found) != num_groups:
        raise Unfamiliar("column chunks")
    return [varint(codec) for codec in found]


def page_locations(index: Bytes, num_pages: int) -> NDArray[np.int64]:
    """An offset index as (pages, 3) of offset, size with header, and first row.

    Raises:
        Unfamiliar: It has another number of pages or another form.
    """
    if native is not None:
        found = native.page_locations(bytes(index), num_pages)
        if found is None:
            raise Unfamiliar("offset index")
        return np.frombuffer(found, dtype=np.int64).reshape(num_pages, 3)
    body = _list_of(index, 0x19, 0x0C, num_pages)
    raw = np.frombuffer(index, dtype=np.uint8)[body:]
    ends = np.flatnonzero(raw < 0x80)
    wanted = 7 * num_pages
    if len(ends) <= wanted or (wanted and raw[ends[wanted]] != 0):
        raise Unfamiliar("offset index")
    values = _varints(raw[: int(ends[wanted - 1]) + 1] if wanted else raw[:0], ends[:wanted]).reshape(num_pages, 7)
    if (values[:, [0, 2, 4, 6]] != _LOCATION).any() or (values[:, [1, 3, 5]] & 1).any():
        raise Unfamiliar("offset index")
    return values[:, [1, 3, 5]] >> 1


def page_minima(indexes: NDArray[np.uint8], num_pages: int, dtype: Any) -> NDArray[Any]:
    """The smallest value of each page from column indexes, where it is the largest too.

    Args:
        indexes: (indexes, bytes) of some that have the same size and number of pages.
        num_pages: Pages of each.
        dtype: Of the values.

    Returns:
        (indexes, pages)

    Raises:
        Unfamiliar: Pages have several values, nulls, or an index has another form.
    """
    width = np.dtype(dtype).itemsize
    first = indexes[0].tobytes()
    nulls = _list_of(first, 0x19, 0x02, num_pages, other_kind=0x01)
    place = nulls + num_pages
    heads = [slice(0, nulls)]
    has_nulls = (indexes[:, nulls:place] & ~np.uint8(2)).any()
    found = []
    for _ in ("smallest", "largest"):
        start = place + _list_of(first[place:], 0x19, 0x08, num_pages)
        heads.append(slice(place, start))
        place = start + num_pages * (1 + width)
        if place > len(first):
            raise Unfamiliar("column index")
        table = indexes[:, start:place].reshape(len(indexes), num_pages, 1 + width)
        if (table[:, :, 0] != width).any():
            raise Unfamiliar("column index")
        found.append(np.ascontiguousarray(table[:, :, 1:]))
    # What is not a value says where values are; it was read in the first index, and must be the same in the others.
    if has_nulls or any((indexes[:, head] != indexes[0, head]).any() for head in heads):
        raise Unfamiliar("column index")
    if not np.array_equal(found[0], found[1]):
        raise Unfamiliar("column index")
    values: NDArray[Any] = found[0].view(np.dtype(dtype).newbyteorder("<")).reshape(len(indexes), num_pages)
    return values


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


def _varints(raw: NDArray[np.uint8], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """All variable-length integers of some bytes, not zigzag; `ends` are their last bytes."""
    if not len(ends):
        return np.zeros(0, dtype=np.int64)
    starts = np.concatenate(([0], ends[:-1] + 1))
    lengths = ends - starts + 1
    longest = int(lengths.max())
    if longest > 9:
        raise Unfamiliar("integer")
    padded = np.concatenate((raw, np.zeros(longest, dtype=np.uint8)))
    values = np.zeros(len(ends), dtype=np.int64)
    for place in range(longest):
        byte = (padded[starts + place] & 0x7F).astype(np.int64) << (7 * place)
        values += np.where(lengths > place, byte, 0)
    return values


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
