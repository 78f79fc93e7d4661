"""What the two ways from units to segments share: their face, rendering, offsets, and checks of input."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import orjson
from numpy.typing import NDArray
from tokenizers import Tokenizer

from packsvc.encode.as_text import AsText, OffsetIds
from packsvc.encode.masks import mask_from_offsets
from packsvc.encode.render import Renderer
from packsvc.encode.rendered import Rendered, RowRefused
from packsvc.encode.segments import Flat, Notes, Segment
from packsvc.encode.tokenizer import LoadedTokenizer
from packsvc.encode.units import Unit
from packsvc.errors import EncodeError
from packsvc.types import ExampleKind, Reason


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

    @cached_property
    def _tokenizer(self) -> Any:
        """The backend; without its post-processor where that trims white space off the offsets."""
        after = orjson.dumps(orjson.loads(self._loaded.definition)["post_processor"])
        if b'"trim_offsets":true' not in after:
            return self._loaded.backend
        copy = Tokenizer.from_str(self._loaded.definition)
        copy.post_processor = None
        copy.encode_special_tokens = self._loaded.backend.encode_special_tokens
        return copy

    @cached_property
    def _as_text(self) -> AsText:
        return AsText(
            self._loaded.backend, definition=self._loaded.definition, control_tokens=self._loaded.control_tokens
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


def render_unit(renderer: Renderer | None, unit: Unit) -> Rendered | RowRefused | None:
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
        return refusal.kept()


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


def check_text(text: str) -> None:
    """Refuse what is no Unicode text.

    Raises:
        RowRefused: It holds a lone surrogate.
    """
    if refusal := refuse_no_text(text):
        raise refusal


def refuse_no_text(text: str) -> RowRefused | None:
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


def refuse_nothing(text: str) -> RowRefused | None:
    return None if text else RowRefused(Reason.EMPTY, "the text is empty")
