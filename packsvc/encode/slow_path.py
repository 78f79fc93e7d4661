"""Units to segments, the slow way: the twin that the fast way must agree with on every row.

No byte lengths and no fast backend: the tokenizer's own backend gives offsets, and each token is looked at in plain
Python. A chat is also rendered without turn marks, to see the same text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from packsvc.encode.paths import (
    Offsets,
    check_text,
    checked_ids,
    refuse_nothing,
    render_unit,
    segment_by_offsets,
)
from packsvc.encode.render import Renderer
from packsvc.encode.rendered import RowRefused
from packsvc.encode.segments import Flat, Segment, flatten
from packsvc.encode.tokenizer import LoadedTokenizer
from packsvc.encode.units import Unit
from packsvc.errors import EncodeError
from packsvc.types import ExampleKind


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
            return refusal.kept()

    def _chat(self, unit: Unit) -> Segment:
        rendered = render_unit(self._renderer, unit)
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
        if refusal := refuse_nothing(text):
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
