"""Inner loops, compiled: see `_native.c`. Absent where no C compiler was there to build it."""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

PackContent: TypeAlias = tuple[bytes, int, int, int, int] | tuple[bytes, int, int, int, int, int]

def crc32(data: bytes, /) -> int:
    """As `zlib.crc32`."""

def read_ranges(descriptor: int, ranges: list[tuple[int, int]], /) -> list[bytes]:
    """Byte ranges (start, length) of a file, by `pread`; shorter where the file ends.

    Raises:
        OSError: One cannot be read.
    """

def read_struct(data: bytes, levels: int, /) -> dict[int, Any] | None:
    """As `shards.thrift.read_struct`; None where that raises."""

def page_locations(
    index: bytes, num_pages: int, start: int, stop: int, packs_per_page: int, /
) -> tuple[list[int], list[int]] | None:
    """As `shards.page_index.page_locations`; None where that raises."""

def page_minima(index: bytes, num_pages: int, width: int, /) -> bytes | None:
    """As `shards.page_index.page_minima`, as the bytes of int64 values; None where that raises."""

def open_pages(
    pages: list[bytes], num_values: list[int], is_zstd: bool, /
) -> tuple[bytes, list[int], list[int]] | None:
    """Read the headers of some pages, verify their checksums, and join their bodies.

    Args:
        pages: With headers: data pages of version 1, PLAIN values, RLE levels, no statistics.
        num_values: Of each, as its header must say.
        is_zstd: Each body is a zstd frame, whose head must say the size that the page's header says.

    Returns:
        The bodies, one after the other, the size of each, and the size of what is compressed in it; None where a page
        is otherwise.
    """

def lay_row(
    packs: list[PackContent],
    counts: NDArray[np.int64],
    seq_len: int,
    align: int,
    pad_id: int,
    padded: bool,
    num_repeated: int,
    /,
) -> (
    tuple[
        bytearray,
        bytearray,
        bytearray,
        bytearray,
        bytearray,
        bytearray,
        bytearray | None,
        bytearray | None,
        int,
        int,
        int,
        int,
        int,
    ]
    | None
):
    """Hold some packs to their counts, and lay them into one row.

    Args:
        packs: For each, the content of its pages (input_ids, loss_mask, cu_seqlens, and loss_weight where there is
            one), where each begins and where the last ends.
        counts: (packs, 4) int64, in the order of `COUNT_COLUMNS`.
        seq_len: Tokens in a pack, padding with them.
        align: Segments are padded to a multiple of it.
        pad_id: The id of padding.
        padded: Whether each pack is padded to `seq_len`.
        num_repeated: So many packs at the end get no targets.

    Returns:
        input_ids, position_ids, labels, seq_idx (int32), padding_mask (bool), cu_seqlens, cu_seqlens_logical (int32;
        None: as cu_seqlens), loss_weights (float32; None where no pack has any); max_seqlen, targets, segments, real
        tokens, and 1 where a target's weight is not 1. None where a pack contradicts itself or its counts.
    """

def count_lengths(lengths: NDArray[np.integer[Any]], counts: NDArray[np.int64], /) -> None:
    """Count lengths into a table.

    Args:
        lengths: (n,) int32 or int64.
        counts: (longest + 1,) to which they are added.

    Raises:
        ValueError: A length has no place in the table.
    """

def place_lengths(
    lengths: NDArray[np.integer[Any]],
    lines: NDArray[np.int64],
    first_line: NDArray[np.int64],
    bins: NDArray[np.int64],
    /,
) -> None:
    """Place lengths by a plan of their histogram; among equal lengths by index.

    Args:
        lengths: (n,) int32 or int64.
        lines: (lines, 4) of length, first bin, bins from there on, and segments in each; the lines of a length stand
            together, in the order in which they are filled.
        first_line: (longest + 1,) for each length its first line.
        bins: (n,) is filled with the bin of each length.

    Raises:
        ValueError: The plan is not one of these lengths, or has numbers from 2^31 on.
    """
