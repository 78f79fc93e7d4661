"""The pages of several packs decoded together: the fast twin of `page_values`, where nothing is out of the ordinary.

Most of a page is known before it is read. Its header can only be one string of bytes, given its size, its checksum and
the form of its content; so it is built and compared, not parsed. Its levels are those of the page before. And zstd
decompresses frames that follow each other in one call, so that a batch costs one context and gives up the interpreter
lock once: little more than half of what page by page costs. Small columns of all packs become arrays at once.

Whatever is not as expected is `Unfamiliar` for all of them, and whoever asked goes page by page to learn what it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from packsvc.shards.page_index import (
    Unfamiliar,
    head_before_checksum,
    head_ends,
    level_blocks_end,
    page_head,
    repetition_starts,
    zigzag_bytes,
)
from packsvc.shards.page_values import CODECS, INT32, PackPages, crc32

MASK, BOUNDARIES, WEIGHT = 1, 2, 3
"""Places of the columns in a pack's pages; ids are the first."""
_ZSTD: Any = CODECS[6]
_SUM_BYTES = (5, 4, 3, 2, 1)
"""What a checksum takes in a header: five bytes in 15 pages of 16."""
_PAGE_SIZES = 1 << 13
"""So many are kept for a form."""
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


class RawPack(NamedTuple):
    """One pack as it stands in the file."""

    pages: list[bytes]
    """With headers: input_ids, loss_mask, cu_seqlens, and loss_weight where the shard has it."""
    codecs: tuple[Any, ...]
    """Of each page; None: not compressed."""


@dataclass(frozen=True, slots=True)
class Packs:
    """Some packs side by side; views that are not to be written to."""

    input_ids: Sequence[memoryview]
    """Bytes of (seq_len,) int32 for each pack."""
    loss_mask: NDArray[np.bool_]
    """(packs, seq_len)"""
    loss_weight: Sequence[memoryview] | None
    """Bytes of (seq_len,) float32 for each pack."""
    cu_seqlens: NDArray[np.int32]
    """The boundaries of all packs, one after the other."""
    sizes: Sequence[int]
    """How many boundaries each pack has."""

    @classmethod
    def of(cls, packs: Sequence[PackPages]) -> Packs:
        """Packs that were decoded one by one."""
        weights = [pack.loss_weight for pack in packs if pack.loss_weight is not None]
        return cls(
            [_bytes_of(pack.input_ids) for pack in packs],
            np.stack([pack.loss_mask for pack in packs]),
            [_bytes_of(weight) for weight in weights] if len(weights) == len(packs) else None,
            np.concatenate([pack.cu_seqlens for pack in packs]),
            [len(pack.cu_seqlens) for pack in packs],
        )


class _Form:
    """What pages of one column with as many values have in common."""

    __slots__ = ("_befores", "_first", "_frame_size", "after", "levels", "size")

    def __init__(self, num_values: int, size: int, levels: bytes, frame: bytes) -> None:
        self.size = size
        """Of the content, decompressed."""
        self.levels = levels
        """That the content begins with: one full list."""
        self._first, after = head_ends(size, num_values)
        self.after = after + frame
        """What comes after the checksum: the rest of the header, and the head of a zstd frame that says `size`."""
        self._frame_size = len(frame)
        self._befores: dict[int, bytes] = {}
        """By size of the page, for the longest checksum."""

    def body(self, page: bytes) -> memoryview | None:
        """What follows the header that a page of this form must have; None where it has another."""
        before = self._befores.get(len(page))
        if before is None:
            if len(self._befores) >= _PAGE_SIZES:
                self._befores = {}
            before = self._befores[len(page)] = self._before(page, _SUM_BYTES[0])
        for sum_bytes in _SUM_BYTES:
            stop = len(before) + sum_bytes + len(self.after)
            body = memoryview(page)[stop - self._frame_size :]
            # What comes after is compared too, so that a checksum of another size than reckoned with is no match.
            if page[:stop] == before + zigzag_bytes(crc32(body)) + self.after:
                return body
            before = self._before(page, sum_bytes - 1)
        return None

    def _before(self, page: bytes, sum_bytes: int) -> bytes:
        return head_before_checksum(len(page), self._first, sum_bytes + len(self.after) - self._frame_size)


class BatchDecoder:
    """Decodes packs of one `seq_len`, a page of each column holding one pack. Threads may share it."""

    def __init__(self, seq_len: int) -> None:
        self._seq_len = seq_len
        self._forms: dict[tuple[int, Any], dict[int, _Form]] = {}
        """By column and codec, and by number of values; as seen last."""

    def decode(self, raws: Sequence[RawPack], sizes: Sequence[int]) -> Packs:
        """Decode some packs, at least one.

        Args:
            raws: The packs, from any shards.
            sizes: How many boundaries each has by its counts.

        Raises:
            Unfamiliar: Something is damaged, or written in another way.
        """
        codec, num_columns, count = raws[0].codecs[0], len(raws[0].pages), len(raws)
        if any(raw.codecs != (codec,) * num_columns for raw in raws):
            raise Unfamiliar("codecs that differ")
        full = [self._seq_len] * count
        forms: list[_Form] = []
        bodies: list[memoryview] = []
        for column in range(num_columns):
            known = self._forms.setdefault((column, codec), {})
            for raw, num_values in zip(raws, sizes if column == BOUNDARIES else full, strict=True):
                page = raw.pages[column]
                form = known.get(num_values)
                body = None if form is None else form.body(page)
                if form is None or body is None:
                    # The first such page in this process, or a file that was written otherwise than the one before.
                    form = known[num_values] = _learn(page, column, num_values, codec)
                    body = form.body(page)
                    if body is None:
                        raise Unfamiliar("a page header")
                forms.append(form)
                bodies.append(body)
        values = _values(_contents(bodies, forms, codec), forms)
        bits = np.frombuffer(b"".join(values[count : 2 * count]), dtype=np.uint8).reshape(count, -1)
        mask = np.unpackbits(bits, axis=1, count=self._seq_len, bitorder="little").view(np.bool_)
        bounds = np.frombuffer(b"".join(values[2 * count : 3 * count]), dtype=INT32)
        return Packs(values[:count], mask, values[3 * count :] or None, bounds, sizes)


def _contents(bodies: list[memoryview], forms: list[_Form], codec: Any) -> list[memoryview]:
    """Bodies decompressed."""
    if codec is None:
        return bodies
    try:
        if codec is not _ZSTD:
            return [
                memoryview(codec.decompress(body, decompressed_size=form.size, asbytes=True))
                for body, form in zip(bodies, forms, strict=True)
            ]
        # Each frame says its size in its head, which was compared, and zstd holds it to that.
        total = sum([form.size for form in forms])
        joined = memoryview(codec.decompress(b"".join(bodies), decompressed_size=total, asbytes=True))
    except (pa.ArrowException, ValueError, OSError):
        raise Unfamiliar("compressed pages") from None
    contents, start = [], 0
    for form in forms:
        stop = start + form.size
        contents.append(joined[start:stop])
        start = stop
    return contents


def _values(contents: list[memoryview], forms: list[_Form]) -> list[memoryview]:
    """What follows the levels, which are as they must be."""
    values = []
    for content, form in zip(contents, forms, strict=True):
        levels = form.levels
        begin = len(levels)
        if content[:begin] != levels:
            raise Unfamiliar("levels")
        values.append(content[begin:])
    return values


def _learn(page: bytes, column: int, num_values: int, codec: Any) -> _Form:
    """The form of a page, from the page itself. Raises Unfamiliar where it is not one full list."""
    head = page_head(page)
    value_bytes = (num_values + 7) // 8 if column == MASK else 4 * num_values
    if head is None or head.num_values != num_values or not 0 <= head.uncompressed <= value_bytes + 1024:
        raise Unfamiliar("a page header")
    body = memoryview(page)[head.size :]
    if crc32(body) != head.crc:
        raise Unfamiliar("a checksum")
    content = bytes(body)
    if codec is not None:
        try:
            content = codec.decompress(body, decompressed_size=head.uncompressed, asbytes=True)
        except (pa.ArrowException, ValueError, OSError):
            raise Unfamiliar("a compressed page") from None
    begin = level_blocks_end(content)
    if len(content) != begin + value_bytes or len(content) != head.uncompressed:
        raise Unfamiliar("the length of a page")
    starts, full = repetition_starts(content, num_values)
    if not full or starts.tolist() != [0]:
        raise Unfamiliar("levels")
    frame = _frame_head(bytes(body[:18]), len(content)) if codec is _ZSTD else b""
    return _Form(num_values, len(content), content[:begin], frame)


def _frame_head(frame: bytes, size: int) -> bytes:
    """The head of a zstd frame that says it holds `size` bytes (RFC 8878, 3.1.1.1). Raises Unfamiliar."""
    if len(frame) < 6 or frame[:4] != _ZSTD_MAGIC:
        raise Unfamiliar("a zstd frame")
    descriptor = frame[4]
    is_single = bool(descriptor & 0x20)
    start = 5 if is_single else 6
    length = (1 if is_single else 0, 2, 4, 8)[descriptor >> 6]
    said = int.from_bytes(frame[start : start + length], "little") + (256 if length == 2 else 0)
    if descriptor & 3 or not length or said != size:
        raise Unfamiliar("a zstd frame")
    return frame[: start + length]


def _bytes_of(values: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(values).data.cast("B")
