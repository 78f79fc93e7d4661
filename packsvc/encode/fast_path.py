"""Units to segments, the fast way: a batch at once.

Every chat is rendered, all texts are encoded in one call, and all masks found from byte lengths. A row that does
not add up is encoded again by the tokenizer's own backend with offsets, and so is one with control tokens that a
person typed. Texts and ready-made ids need neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packsvc.encode.backends import Backend, FlatIds
from packsvc.encode.byte_lengths import ByteLengths
from packsvc.encode.masks import masks_from_bytes
from packsvc.encode.paths import (
    Offsets,
    checked_ids,
    refuse_no_text,
    refuse_nothing,
    render_unit,
    segment_by_offsets,
)
from packsvc.encode.render import Renderer
from packsvc.encode.rendered import Rendered, RowRefused
from packsvc.encode.segments import Flat, Notes, Segment, flatten
from packsvc.encode.tokenizer import LoadedTokenizer
from packsvc.encode.units import Unit
from packsvc.types import ExampleKind, Reason

MAX_CHARACTERS = 2**18
"""Text that one call of the tokenizer gets, a longer row apart; bounds what a batch needs besides its ids."""
MAX_UNITS = 256


class FastPath:
    """Ids from the fastest backend that is exact, masks from byte lengths, many rows at once."""

    def __init__(
        self,
        loaded: LoadedTokenizer,
        *,
        renderer: Renderer | None,
        backend: Backend,
        lengths: ByteLengths | None,
        offsets: Offsets,
        weights: bool,
    ) -> None:
        self._loaded = loaded
        self._renderer = renderer
        self._backend = backend
        self._lengths = lengths
        self._offsets = offsets
        self._weights = weights

    def batches(self, units: Iterable[Unit]) -> Iterator[tuple[list[Unit], Flat]]:
        waiting: list[Unit] = []
        rendered: list[Rendered | RowRefused | None] = []
        characters = 0
        for unit in units:
            result = render_unit(self._renderer, unit)
            waiting.append(unit)
            rendered.append(result)
            characters += len(result.text) if isinstance(result, Rendered) else len(unit.example.text or "")
            if len(waiting) >= MAX_UNITS or characters >= MAX_CHARACTERS:
                yield waiting, self._encode(waiting, rendered)
                waiting, rendered, characters = [], [], 0
        if waiting:
            yield waiting, self._encode(waiting, rendered)

    def one(self, unit: Unit) -> Segment | RowRefused:
        flat = self._encode([unit], [render_unit(self._renderer, unit)])
        return flat.refused[0] if flat.refused else flat.segment(0)

    def _encode(self, units: Sequence[Unit], rendered: Sequence[Rendered | RowRefused | None]) -> Flat:
        """Encode units; those of one kind, and without typed control tokens, never leave their flat buffers."""
        lanes: dict[Callable[..., Flat], list[int]] = {}
        for i, unit in enumerate(units):
            lanes.setdefault(self._lane(unit, rendered[i]), []).append(i)
        parts = [(lane(*_take(units, rendered, where)), where) for lane, where in lanes.items()]
        if len(parts) == 1:
            return parts[0][0]
        segments: list[Segment | RowRefused] = [RowRefused(Reason.EMPTY, "")] * len(units)
        for flat, where in parts:
            for k, i in enumerate(where):
                segments[i] = flat.refused[k] if k in flat.refused else flat.segment(k)
        return flatten(segments, weights=self._weights)

    def _lane(self, unit: Unit, rendered: Rendered | RowRefused | None) -> Callable[..., Flat]:
        if unit.example.kind is ExampleKind.TEXT:
            return self._texts
        if unit.example.kind is ExampleKind.PRETOKENIZED:
            return self._pretokenized
        if self._lengths is None or (isinstance(rendered, Rendered) and rendered.typed_controls):
            return self._by_offsets
        return self._chats

    def _chats(self, units: Sequence[Unit], rendered: Sequence[Rendered | RowRefused]) -> Flat:
        assert self._lengths is not None
        refused = {i: r for i, r in enumerate(rendered) if isinstance(r, RowRefused)}
        for i, r in enumerate(rendered):
            if isinstance(r, Rendered) and not r.text.isascii() and (bad := refuse_no_text(r.text)):
                refused[i] = bad
        good = [r for i, r in enumerate(rendered) if i not in refused and isinstance(r, Rendered)]
        texts = [r.text for r in good]
        flat = self._backend.encode(texts)
        masks = masks_from_bytes(
            flat.ids,
            flat.offsets,
            texts=texts,
            spans=[r.spans for r in good],
            lengths=self._lengths,
            weights=self._weights,
        )
        notes = [
            Notes(edge_tokens=e, reasoning_dropped=r.reasoning_dropped, turns_without_stop=r.turns_without_stop)
            for e, r in zip(masks.edge_tokens.tolist(), good, strict=True)
        ]
        result = _with_gaps(flat, masks.mask, masks.weight, notes, refused, len(units))
        if not masks.failed:
            return result
        places = [i for i in range(len(units)) if i not in refused]
        again = {places[k]: self._one_by_offsets(good[k]) for k in masks.failed}
        return _replaced(result, again, weights=self._weights)

    def _by_offsets(self, units: Sequence[Unit], rendered: Sequence[Rendered | RowRefused]) -> Flat:
        segments = [self._one_by_offsets(r) if isinstance(r, Rendered) else r for r in rendered]
        return flatten(segments, weights=self._weights)

    def _one_by_offsets(self, rendered: Rendered) -> Segment | RowRefused:
        try:
            return segment_by_offsets(self._offsets.encode(rendered), rendered, weights=self._weights)
        except RowRefused as refusal:
            return refusal.kept()

    def _texts(self, units: Sequence[Unit], rendered: Sequence[Rendered | RowRefused]) -> Flat:
        texts = [unit.example.text or "" for unit in units]
        refused = {i: bad for i, text in enumerate(texts) if (bad := refuse_no_text(text) or refuse_nothing(text))}
        flat = self._backend.encode([t for i, t in enumerate(texts) if i not in refused], special=True)
        eos = self._loaded.tokenizer.eos_token_id
        if eos is not None:
            flat = with_last(flat, int(eos))
        mask = np.ones(len(flat.ids), np.bool_)
        weight = np.ones(len(flat.ids), np.float32) if self._weights else None
        return _with_gaps(flat, mask, weight, None, refused, len(units))

    def _pretokenized(self, units: Sequence[Unit], rendered: Sequence[Rendered | RowRefused]) -> Flat:
        return flatten([self._ready(unit) for unit in units], weights=self._weights)

    def _ready(self, unit: Unit) -> Segment | RowRefused:
        try:
            ids, mask = checked_ids(unit, vocab_size=self._loaded.facts.vocab_size)
        except RowRefused as refusal:
            return refusal.kept()
        mask[:1] = False
        return Segment(ids=ids, mask=mask, weight=mask.astype(np.float32) if self._weights else None)


def with_last(flat: FlatIds, token: int) -> FlatIds:
    """Append a token to each text that does not end with it."""
    lengths = np.diff(flat.offsets)
    missing = np.ones(len(lengths), np.bool_)
    filled = lengths > 0
    missing[filled] = flat.ids[flat.offsets[1:][filled] - 1] != token
    ids = np.insert(flat.ids, flat.offsets[1:][missing], token)
    return FlatIds(ids=ids, offsets=np.concatenate([[0], np.cumsum(lengths + missing)]).astype(np.int64))


def _take(units: Sequence[Unit], rendered: Sequence[Any], where: list[int]) -> tuple[Sequence[Unit], Sequence[Any]]:
    if len(where) == len(units):
        return units, rendered
    return [units[i] for i in where], [rendered[i] for i in where]


def _with_gaps(
    flat: FlatIds,
    mask: NDArray[np.bool_],
    weight: NDArray[np.float32] | None,
    notes: list[Notes] | None,
    refused: dict[int, RowRefused],
    num_units: int,
) -> Flat:
    """Give refused units their empty places, and take the first token of every unit off the loss."""
    starts = flat.offsets[:-1][np.diff(flat.offsets) > 0]
    mask[starts] = False
    if weight is not None:
        weight[starts] = 0
    offsets, all_notes = flat.offsets, notes or [Notes() for _ in range(len(flat.offsets) - 1)]
    if refused:
        lengths = np.zeros(num_units, np.int64)
        encoded = [i for i in range(num_units) if i not in refused]
        lengths[encoded] = np.diff(flat.offsets)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        remaining = iter(all_notes)
        all_notes = [Notes() if i in refused else next(remaining) for i in range(num_units)]
    return Flat(ids=flat.ids, offsets=offsets, mask=mask, weight=weight, notes=all_notes, refused=refused)


def _replaced(flat: Flat, segments: dict[int, Segment | RowRefused], *, weights: bool) -> Flat:
    """The same units with some of them encoded anew."""
    everything: list[Segment | RowRefused] = []
    for i in range(len(flat.notes)):
        everything.append(segments.get(i) or flat.refused.get(i) or flat.segment(i))
    return flatten(everything, weights=weights)
