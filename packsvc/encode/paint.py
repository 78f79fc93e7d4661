"""Weights laid over the characters of one text, one stroke over another."""

from __future__ import annotations

from itertools import pairwise

from packsvc.encode.rendered import Span


class Paint:
    """Strokes of weight; later ones cover earlier ones."""

    __slots__ = ("_strokes",)

    def __init__(self) -> None:
        self._strokes: list[tuple[int, int, float, int]] = []

    def add(self, start: int, end: int, weight: float, message: int) -> None:
        """Give characters [start, end) a weight; 0 takes away what was there."""
        if start < end:
            self._strokes.append((start, end, weight, message))

    def spans(self) -> tuple[Span, ...]:
        """What is left above weight 0, in order and disjoint."""
        strokes = self._strokes
        end = 0
        for stroke in strokes:
            if stroke[0] < end or stroke[2] <= 0:
                return tuple(map(Span._make, self._flat()))
            end = stroke[1]
        return tuple(map(Span._make, strokes))

    def _flat(self) -> list[tuple[int, int, float, int]]:
        """One pass over the edges, with the strokes that are open at each; the youngest is seen."""
        edges: dict[int, tuple[list[int], list[int]]] = {}
        for number, (start, end, _, _) in enumerate(self._strokes):
            edges.setdefault(start, ([], []))[0].append(number)
            edges.setdefault(end, ([], []))[1].append(number)
        pieces: list[tuple[int, int, float, int]] = []
        opened: set[int] = set()
        for here, after in pairwise(sorted(edges)):
            opened.update(edges[here][0])
            opened.difference_update(edges[here][1])
            if not opened:
                continue
            _, _, weight, message = self._strokes[max(opened)]
            if weight <= 0:
                continue
            if pieces and pieces[-1][1] == here and pieces[-1][2:] == (weight, message):
                here = pieces.pop()[0]
            pieces.append((here, after, weight, message))
        return pieces
