"""The pieces of a plan, dealt to groups, in arrays.

A job of 10^9 rows has 124,000 pieces. As objects they are 260 bytes each, in the driver and in every worker; here
they are 53, and 24 more where a piece has a path. An object is made when somebody looks at one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from packsvc.types import Piece, PieceKind

KINDS = tuple(PieceKind)
NONE = -1
ROW = np.dtype(
    [
        ("file", np.int32),
        ("kind", np.int8),
        ("start", np.int64),
        ("stop", np.int64),
        ("first_row", np.int64),
        ("num_rows", np.int64),
        ("size_bytes", np.int64),
        ("path", np.int32),
        ("take", np.int32),
    ]
)
"""`num_rows` may be NONE; `path` and `take` are places in lists of their own, or NONE."""


class Pieces(Sequence[Piece]):
    """Some pieces in a fixed order.

    Args:
        table: (n,) of `ROW`.
        paths: UTF-8; what `path` in the table counts.
        takes: What `take` in the table counts.
    """

    def __init__(self, table: NDArray[Any], paths: NDArray[np.bytes_], takes: Sequence[tuple[int, ...]]) -> None:
        self.table = table
        self.paths = paths
        self.takes = takes

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> Pieces:
        """Out of objects, each of which is let go at once."""
        paths: list[bytes] = []
        takes: list[tuple[int, ...]] = []

        def row(p: Piece) -> tuple[int, ...]:
            path = take = NONE
            if p.path is not None:
                path = len(paths)
                paths.append(p.path.encode())
            if p.take is not None:
                take = len(takes)
                takes.append(p.take)
            rows = NONE if p.num_rows is None else p.num_rows
            return p.file, KINDS.index(p.kind), p.start, p.stop, p.first_row, rows, p.size_bytes, path, take

        table = np.fromiter((row(p) for p in pieces), ROW)
        return cls(table, np.array(paths, np.bytes_), takes)

    @classmethod
    def together(cls, parts: Sequence[Pieces]) -> Pieces:
        """All pieces of the parts, in order."""
        if not parts:
            return cls.of(())
        takes = [take for part in parts for take in part.takes]
        table = np.concatenate([part.table for part in parts])
        for key, sizes in (("path", [len(p.paths) for p in parts]), ("take", [len(p.takes) for p in parts])):
            before = np.repeat(np.cumsum([0, *sizes[:-1]]), [len(p) for p in parts])
            table[key] += np.where(table[key] == NONE, 0, before).astype(np.int32)
        return cls(table, np.concatenate([part.paths for part in parts]), takes)

    def at(self, places: NDArray[np.int64]) -> Pieces:
        """The pieces at these places, in this order."""
        return Pieces(self.table[places], self.paths, self.takes)

    def rows(self) -> NDArray[np.int64]:
        """(n,) rows of each piece; 0 where nothing was counted."""
        rows: NDArray[np.int64] = np.maximum(self.table["num_rows"], 0)
        return rows

    def __len__(self) -> int:
        return len(self.table)

    @overload
    def __getitem__(self, place: int) -> Piece: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Piece, ...]: ...
    def __getitem__(self, place: int | slice) -> Piece | tuple[Piece, ...]:
        if isinstance(place, slice):
            return tuple(self._piece(row) for row in self.table[place].tolist())
        return self._piece(self.table[place].item())

    def __iter__(self) -> Iterator[Piece]:
        return (self[place] for place in range(len(self)))

    def _piece(self, row: tuple[int, ...]) -> Piece:
        file, kind, start, stop, first_row, rows, size_bytes, path, take = row
        return Piece(
            file=file,
            kind=KINDS[kind],
            start=start,
            stop=stop,
            first_row=first_row,
            num_rows=None if rows == NONE else rows,
            size_bytes=size_bytes,
            path=None if path == NONE else self.paths[path].decode(),
            take=None if take == NONE else self.takes[take],
        )


class Groups(Sequence[tuple[Piece, ...]]):
    """Pieces by group.

    Args:
        pieces: Group by group.
        offsets: (groups + 1,) where each group starts.
    """

    def __init__(self, pieces: Pieces, offsets: NDArray[np.int64]) -> None:
        self.pieces = pieces
        self.offsets = offsets

    @classmethod
    def of(cls, groups: Iterable[Sequence[Piece]]) -> Groups:
        """Out of objects, each of which is let go at once."""
        sizes: list[int] = []

        def flat() -> Iterator[Piece]:
            for group in groups:
                sizes.append(len(group))
                yield from group

        pieces = Pieces.of(flat())
        return cls(pieces, np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64))

    @property
    def num_rows(self) -> int:
        """Rows of all groups."""
        return int(self.pieces.rows().sum())

    @property
    def size_bytes(self) -> list[int]:
        """Uncompressed bytes of each group."""
        ends = np.concatenate([[0], np.cumsum(self.pieces.table["size_bytes"])])
        return [int(n) for n in np.diff(ends[self.offsets])]

    def of_kind(self, kind: PieceKind, groups: Sequence[int]) -> list[Piece]:
        """The pieces of one kind in the groups."""
        found = np.flatnonzero(self.pieces.table["kind"] == KINDS.index(kind))
        if not len(found):
            return []
        where = np.searchsorted(self.offsets, found, side="right") - 1
        return [self.pieces[int(place)] for place in found[np.isin(where, np.asarray(groups, np.int64))]]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, group: int) -> tuple[Piece, ...]: ...
    @overload
    def __getitem__(self, group: slice) -> list[tuple[Piece, ...]]: ...
    def __getitem__(self, group: int | slice) -> tuple[Piece, ...] | list[tuple[Piece, ...]]:
        if isinstance(group, slice):
            return [self[g] for g in range(*group.indices(len(self)))]
        group = range(len(self))[group]
        return self.pieces[int(self.offsets[group]) : int(self.offsets[group + 1])]

    def __iter__(self) -> Iterator[tuple[Piece, ...]]:
        return (self[group] for group in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Groups):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]
