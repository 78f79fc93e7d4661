"""What stands in a page: its body under the checksum, and the values behind its levels.

One page at a time, and what is wrong with it is told: `page_batch` is the fast twin for several.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from packsvc.errors import DamageError
from packsvc.shards.page_index import PageHead, level_blocks_end, page_head, repetition_starts
from packsvc.shards.thrift import Unfamiliar

CODECS = {0: None, 1: pa.Codec("snappy"), 6: pa.Codec("zstd"), 7: pa.Codec("lz4_raw")}
"""By the numbers of Parquet. They keep no state, so that threads may share them."""
INT32, FLOAT32 = np.dtype("<i4"), np.dtype("<f4")


@dataclass(frozen=True, slots=True)
class PackPages:
    """One pack as its pages say; views that are not to be written to. Its lists are as long as its counts say."""

    input_ids: NDArray[np.int32]
    """(seq_len,)"""
    loss_mask: NDArray[np.bool_]
    """(seq_len,)"""
    loss_weight: NDArray[np.float32] | None
    """(seq_len,)"""
    cu_seqlens: NDArray[np.int32]
    """0 first, seq_len last."""

    @property
    def size_bytes(self) -> int:
        """What it takes in memory."""
        weight = 0 if self.loss_weight is None else self.loss_weight.nbytes
        return self.input_ids.nbytes + self.loss_mask.nbytes + weight + self.cu_seqlens.nbytes


class PageDecoder:
    """Decodes the pages of one shard."""

    def __init__(self, where: str, seq_len: int) -> None:
        self._where = where
        self._seq_len = seq_len
        self._levels: dict[int, bytes] = {}
        """By lists in a page: the levels of full ones, as seen last."""

    def decode(
        self,
        pages: Sequence[tuple[str, Any, int, bytes]],
        counts: dict[str, NDArray[np.int64]],
        start: int,
        stop: int,
    ) -> list[PackPages]:
        """Packs [start, stop), which are one page of each column.

        Args:
            pages: Column, codec, first byte in the file, and the bytes with the header.
            counts: The count columns of the shard.

        Raises:
            Unfamiliar: A page is not as it was written, or was written otherwise; pyarrow tells.
            DamageError: A checksum is wrong.
        """
        rows = stop - start
        arrays: dict[str, Any] = {"loss_weight": [None] * rows}
        for name, codec, at, data in pages:
            head = page_head(data)
            if head is None or head.size + head.compressed != len(data):
                raise Unfamiliar(f"the page header at byte {at}")
            body = self._body(head, data, codec, start, stop, name, at)
            if name == "cu_seqlens":
                segments, tokens = (counts[key][start:stop].tolist() for key in ("num_segments", "num_tokens"))
                arrays[name] = _lists(head, body, num_boundaries(segments, tokens, self._seq_len), at)
            else:
                begin = self._values_begin(head, body, rows, at)
                arrays[name] = _rows(name, body, begin, rows, self._seq_len, at)
        names = ("input_ids", "loss_mask", "loss_weight", "cu_seqlens")
        return [PackPages(*values) for values in zip(*(arrays[name] for name in names), strict=True)]

    def _body(self, head: PageHead, data: bytes, codec: Any, start: int, stop: int, name: str, at: int) -> Any:
        """The content of a page, its checksum verified."""
        body = memoryview(data)[head.size :]
        if zlib.crc32(body) != head.crc:
            packs = f"pack {start}" if stop == start + 1 else f"packs {start} to {stop - 1}"
            raise DamageError(
                f"{self._where}, {packs}: {name} is damaged: the page at byte {at} does not have the checksum "
                "that its header gives"
            )
        if codec is None:
            if head.uncompressed != len(body):
                raise Unfamiliar(f"the page header at byte {at}")
            return body
        if not 0 <= head.uncompressed <= 8 * (stop - start) * self._seq_len + 1024:
            raise Unfamiliar(f"the page header at byte {at}")
        try:
            return codec.decompress(body, decompressed_size=head.uncompressed, asbytes=True)
        except (pa.ArrowException, ValueError, OSError):
            raise Unfamiliar(f"the page at byte {at}") from None

    def _values_begin(self, head: PageHead, body: Any, rows: int, at: int) -> int:
        """Where the values of a token column begin, its levels being those of `rows` full lists."""
        seq_len = self._seq_len
        if head.num_values != rows * seq_len:
            raise Unfamiliar(f"the page header at byte {at}")
        known = self._levels.get(rows, b"?")
        if body[: len(known)] != known:
            known = bytes(body[: level_blocks_end(body)])
            starts, full = repetition_starts(body, head.num_values)
            if not full or not np.array_equal(starts, np.arange(rows) * seq_len):
                raise Unfamiliar(f"the levels of the page at byte {at}")
            self._levels[rows] = known
        return len(known)


def num_boundaries(num_segments: Sequence[int], num_tokens: Sequence[int], seq_len: int) -> list[int]:
    """Boundaries of each pack by its counts: one more than its segments, and one for a tail."""
    return [n + 1 + (t < seq_len) for n, t in zip(num_segments, num_tokens, strict=True)]


def _lists(head: PageHead, body: Any, sizes: list[int], at: int) -> list[NDArray[np.int32]]:
    """The lists of a page of boundaries, as long as the counts say. Raises Unfamiliar."""
    begin, total = level_blocks_end(body), sum(sizes)
    if head.num_values != total or len(body) != begin + 4 * total:
        raise Unfamiliar(f"the number of boundaries in the page at byte {at}")
    values = np.frombuffer(body, dtype=INT32, offset=begin)
    if len(sizes) == 1:
        return [values]
    starts, full = repetition_starts(body, total)
    bounds = np.concatenate(([0], np.cumsum(sizes)))
    if not full or not np.array_equal(starts, bounds[:-1]):
        raise Unfamiliar(f"the number of boundaries in the page at byte {at}")
    return [values[a:b] for a, b in itertools.pairwise(bounds)]


def _rows(name: str, body: Any, begin: int, rows: int, seq_len: int, at: int) -> NDArray[Any]:
    """(rows, seq_len) values of a token column. Raises Unfamiliar."""
    count = rows * seq_len
    if name == "loss_mask":
        if len(body) != begin + (count + 7) // 8:
            raise Unfamiliar(f"the length of the page at byte {at}")
        bits = np.frombuffer(body, dtype=np.uint8, offset=begin)
        flat: NDArray[Any] = np.unpackbits(bits, count=count, bitorder="little").view(np.bool_)
    else:
        if len(body) != begin + 4 * count:
            raise Unfamiliar(f"the length of the page at byte {at}")
        flat = np.frombuffer(body, dtype=FLOAT32 if name == "loss_weight" else INT32, offset=begin)
    return flat.reshape(rows, seq_len)
