"""The pages of several packs opened together, by compiled code: the fast twin of `page_values`.

Headers and checksums of all pages cost one call, and zstd decompresses frames that follow each other in one call, so
that a batch costs one context and gives up the interpreter lock once: little more than half of what page by page costs.
Whatever is not as expected is `Unfamiliar` for all of them, and whoever asked goes page by page to learn what it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from packsvc.compiled import native
from packsvc.shards.page_values import CODECS
from packsvc.shards.thrift import Unfamiliar

if TYPE_CHECKING:
    from packsvc._native import PackContent
_ZSTD: Any = CODECS[6]


class RawPack(NamedTuple):
    """One pack as it stands in the file."""

    pages: list[bytes]
    """With headers: input_ids, loss_mask, cu_seqlens, and loss_weight where the shard has it."""
    codecs: tuple[Any, ...]
    """Of each page; None: not compressed."""


def open_packs(raws: Sequence[RawPack], sizes: Sequence[int], seq_len: int) -> list[PackContent]:
    """Open some packs of one output, a page of each column holding one pack. Only where there is compiled code.

    Args:
        raws: The packs, from any shards; at least one.
        sizes: How many boundaries each has by its counts.
        seq_len: Tokens in each.

    Returns:
        For each pack the content of its pages: one buffer, where each begins in it and where the last ends. Levels
        and values are not looked at; `lay_row` checks them.

    Raises:
        Unfamiliar: Something is damaged, or written in another way.
    """
    codec, num_columns = raws[0].codecs[0], len(raws[0].pages)
    if any(raw.codecs != (codec,) * num_columns for raw in raws):
        raise Unfamiliar("codecs that differ")
    pages: list[bytes] = []
    num_values: list[int] = []
    for raw, size in zip(raws, sizes, strict=True):
        pages += raw.pages
        num_values += (seq_len, seq_len, size, seq_len)[:num_columns]
    opened = native.open_pages(pages, num_values, codec is _ZSTD)
    if opened is None:
        raise Unfamiliar("a page")
    bodies, body_sizes, sizes_inside = opened
    content = _decompressed(bodies, body_sizes, sizes_inside, codec)
    found: list[Any] = []
    start = 0
    for first in range(0, len(pages), num_columns):
        places = [start]
        for size in sizes_inside[first : first + num_columns]:
            places.append(start := start + size)
        found.append((content, *places))
    return found


def _decompressed(bodies: bytes, body_sizes: list[int], sizes_inside: list[int], codec: Any) -> bytes:
    """The content of pages, one after the other."""
    if codec is None:
        if body_sizes != sizes_inside:
            raise Unfamiliar("a page header")
        return bodies
    try:
        if codec is _ZSTD:
            # Each frame says its size in its head, which was compared, and zstd holds it to that.
            return bytes(codec.decompress(bodies, decompressed_size=sum(sizes_inside), asbytes=True))
        view, start, parts = memoryview(bodies), 0, []
        for body_size, size in zip(body_sizes, sizes_inside, strict=True):
            stop = start + body_size
            parts.append(codec.decompress(view[start:stop], decompressed_size=size, asbytes=True))
            start = stop
    except (pa.ArrowException, ValueError, OSError):
        raise Unfamiliar("compressed pages") from None
    return b"".join(parts)
