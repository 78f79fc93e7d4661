"""Units to segments: the fast way, a batch at once, and its slow twin, a unit at a time.

The fast way renders every chat, encodes all texts in one call and finds all masks from byte lengths. What does not
add up there is encoded again by the tokenizer's own backend with offsets. The slow way has nothing but that, looks
at each token in plain Python, and renders without turn marks too, to see the same text. Both must agree on every
row; the audit of a job compares them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from packsvc.encode.as_text import AsText, OffsetIds
from packsvc.encode.backends import Backend, FlatIds
from packsvc.encode.byte_lengths import ByteLengths
from packsvc.encode.masks import mask_from_offsets, masks_from_bytes
from packsvc.encode.render import Renderer
from packsvc.encode.rendered import Rendered, RowRefused
from packsvc.encode.segments import Flat, Notes, Segment, flatten
from packsvc.encode.tokenizer import LoadedTokenizer
from packsvc.encode.units import Unit
from packsvc.errors import EncodeError
from packsvc.types import ExampleKind, Reason

MAX_CHARACTERS = 2**20
"""Text that one call of the tokenizer gets, a longer row apart; bounds what a batch needs besides its ids."""
MAX_UNITS = 512


class Path(Protocol):
    """A way from units to segments."""

    def batches(self, units: Iterable[Unit]) -> Iterator[tuple[list[Unit], Flat]]:
        """Encode units as they come, a bounded number at once; a refused one keeps its place without tokens."""

    def one(self, unit: Unit) -> Segment | RowRefused:
        """Encode a single unit."""


class Offsets:
    """Ids and character offsets of texts by the tokenizer's own backend."""

    def __init__(self, loaded: LoadedTokenizer) -> None:
        self._loaded = loaded

    def encode(self, rendered: Rendered) -> OffsetIds:
        """Tokens of a render.

        Raises:
            RowRefused: They or their offsets are not to be had.
        """
        check_text(rendered.text)
        if rendered.typed_controls:
            result = self._as_text.encode(rendered)
        else:
            encoding = self._tokenizer.encode(rendered.text, add_special_tokens=False)
            result = OffsetIds(ids=encoding.ids, offsets=encoding.offsets)
        before = 0
        for start, stop in result.offsets:
            if not before <= start <= stop <= len(rendered.text):
                raise RowRefused(
                    Reason.ENCODE_MISMATCH,
                    f"the tokenizer's offsets do not run along the text: ({start}, {stop}) after {before}",
                )
            before = start
        return result

    def as_text_ids(self, rendered: Rendered) -> list[int]:
        """Ids of a render with typed control tokens."""
        check_text(rendered.text)
        return self._as_text.encode(rendered).ids

    @cached_property
    def _tokenizer(self) -> Any:
        """The backend; without its post-processor where that trims white space off the offsets."""
        definition = self._loaded.backend.to_str()
        if '"trim_offsets":true' not in json.dumps(json.loads(definition)["post_processor"], separators=(",", ":")):
            return self._loaded.backend
        copy = Tokenizer.from_str(definition)
        copy.post_processor = None
        copy.encode_special_tokens = self._loaded.backend.encode_special_tokens
        return copy

    @cached_property
    def _as_text(self) -> AsText:
        return AsText(self._loaded.backend, self._loaded.control_tokens)


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
            result = _render(self._renderer, unit)
            waiting.append(unit)
            rendered.append(result)
            characters += len(result.text) if isinstance(result, Rendered) else len(unit.example.text or "")
            if len(waiting) >= MAX_UNITS or characters >= MAX_CHARACTERS:
                yield waiting, self._encode(waiting, rendered)
                waiting, rendered, characters = [], [], 0
        if waiting:
            yield waiting, self._encode(waiting, rendered)

    def one(self, unit: Unit) -> Segment | RowRefused:
        flat = self._encode([unit], [_render(self._renderer, unit)])
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
            if isinstance(r, Rendered) and not r.text.isascii() and (bad := _not_text(r.text)):
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
            return refusal

    def _texts(self, units: Sequence[Unit], rendered: Sequence[Rendered | RowRefused]) -> Flat:
        texts = [unit.example.text or "" for unit in units]
        refused = {i: bad for i, text in enumerate(texts) if (bad := _not_text(text) or _nothing(text))}
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
            return refusal
        mask[:1] = False
        return Segment(ids=ids, mask=mask, weight=mask.astype(np.float32) if self._weights else None)


class SlowPath:
    """The twin: no byte lengths, no fast backend, no turn marks unseen; one token after the other."""

    def __init__(self, loaded: LoadedTokenizer, *, renderer: Renderer | None, offsets: Offsets, weights: bool) -> None:
        self._loaded = loaded
        self._renderer = renderer
        self._offsets = offsets
        self._weights = weights

    def batches(self, units: Iterable[Unit]) -> Iterator[tuple[list[Unit], Flat]]:
        for unit in units:
            yield [unit], flatten([self.one(unit)], weights=self._weights)

    def one(self, unit: Unit) -> Segment | RowRefused:
        try:
            if unit.example.kind is ExampleKind.TEXT:
                return self._text(unit)
            if unit.example.kind is ExampleKind.PRETOKENIZED:
                ids, mask = checked_ids(unit, vocab_size=self._loaded.facts.vocab_size)
                learned = [bool(m) and i > 0 for i, m in enumerate(mask)]
                return self._segment(ids.tolist(), [float(m) for m in learned])
            return self._chat(unit)
        except RowRefused as refusal:
            return refusal

    def _chat(self, unit: Unit) -> Segment:
        rendered = _render(self._renderer, unit)
        if isinstance(rendered, RowRefused):
            raise rendered
        assert rendered is not None
        assert self._renderer is not None
        plain = self._renderer.plain(unit.messages, unit.example.tools)
        if plain != rendered.text:
            at = next((i for i, (a, b) in enumerate(zip(plain, rendered.text, strict=False)) if a != b), len(plain))
            raise EncodeError(
                f"row {unit.example.row} of input {unit.example.file}: the render with turn marks differs from the "
                f"plain one at character {at}: {rendered.text[at : at + 40]!r}, not {plain[at : at + 40]!r}. This is "
                "a fault of packsvc with this template; please report it."
            )
        return segment_by_offsets(self._offsets.encode(rendered), rendered, weights=self._weights)

    def _text(self, unit: Unit) -> Segment:
        text = unit.example.text or ""
        check_text(text)
        if refusal := _nothing(text):
            raise refusal
        tokenizer = self._loaded.tokenizer
        ids = list(tokenizer(text, verbose=False)["input_ids"])
        if tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
            ids.append(tokenizer.eos_token_id)
        return self._segment(ids, [float(i > 0) for i in range(len(ids))])

    def _segment(self, ids: list[int], weight: list[float]) -> Segment:
        return Segment(
            ids=np.array(ids, np.int32),
            mask=np.array([w > 0 for w in weight], np.bool_),
            weight=np.array(weight, np.float32) if self._weights else None,
        )


def segment_by_offsets(tokens: OffsetIds, rendered: Rendered, *, weights: bool) -> Segment:
    """A segment from tokens with offsets."""
    row = mask_from_offsets(tokens.offsets, rendered.spans)
    mask = np.array(row.mask, np.bool_)
    mask[:1] = False
    weight = np.array(row.weight, np.float32) * mask if weights else None
    notes = Notes(
        edge_tokens=row.edge_tokens,
        reasoning_dropped=rendered.reasoning_dropped,
        turns_without_stop=rendered.turns_without_stop,
    )
    return Segment(ids=np.array(tokens.ids, np.int32), mask=mask, weight=weight, notes=notes)


def checked_ids(unit: Unit, *, vocab_size: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Ids and a copy of the mask of a pretokenized example.

    Raises:
        RowRefused: There are none, they do not belong together, or an id is not the tokenizer's.
    """
    ids, mask = unit.example.input_ids, unit.example.loss_mask
    if ids is None or mask is None or len(ids) != len(mask):
        lengths = (None if ids is None else len(ids), None if mask is None else len(mask))
        raise RowRefused(Reason.WRONG_TYPE, f"input_ids and loss_mask have lengths {lengths[0]} and {lengths[1]}")
    if not len(ids):
        raise RowRefused(Reason.EMPTY, "input_ids is empty")
    wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(wrong):
        at = int(wrong[0])
        raise RowRefused(
            Reason.WRONG_TYPE, f"input_ids[{at}] is {int(ids[at])}, outside the tokenizer's ids 0 to {vocab_size - 1}"
        )
    return ids.astype(np.int32), mask.astype(np.bool_)


def with_last(flat: FlatIds, token: int) -> FlatIds:
    """Append a token to each text that does not end with it."""
    lengths = np.diff(flat.offsets)
    missing = np.ones(len(lengths), np.bool_)
    filled = lengths > 0
    missing[filled] = flat.ids[flat.offsets[1:][filled] - 1] != token
    ids = np.insert(flat.ids, flat.offsets[1:][missing], token)
    return FlatIds(ids=ids, offsets=np.concatenate([[0], np.cumsum(lengths + missing)]).astype(np.int64))


def check_text(text: str) -> None:
    """Refuse what is no Unicode text.

    Raises:
        RowRefused: It holds a lone surrogate.
    """
    if refusal := _not_text(text):
        raise refusal


def _not_text(text: str) -> RowRefused | None:
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return RowRefused(
            Reason.ENCODE_MISMATCH,
            f"lone surrogate U+{ord(text[error.start]):04X} at character {error.start}: no tokenizer has ids for it",
        )
    return None


def _nothing(text: str) -> RowRefused | None:
    return None if text else RowRefused(Reason.EMPTY, "the text is empty")


def _render(renderer: Renderer | None, unit: Unit) -> Rendered | RowRefused | None:
    if unit.refused is not None:
        return unit.refused
    if unit.example.kind is not ExampleKind.CHAT:
        return None
    if renderer is None:
        raise EncodeError(
            f"row {unit.example.row} of input {unit.example.file} is a chat, and neither the tokenizer nor the job "
            "has a chat template. Name a template file under `chat_template`."
        )
    try:
        return renderer.render(unit.messages, unit.example.tools, unit.weights, unit.part_weights)
    except RowRefused as refusal:
        return refusal


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
