"""What is shown: a pack, its segments apart, their tokens as texts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from packsvc.types import JsonDict

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenView:
    """One token."""

    id: int
    text: str
    """What it adds to the text. A character that several tokens make stands with the first of them, the others
    have ""; where only some of these are trained, each shows its bytes instead, as <0xE2>."""
    weight: float
    """How much it counts in the loss; 0 is not trained."""
    control: bool = False
    """A special token or a turn marker."""
    why: str | None = None
    """Why it is trained or not, where that is known."""

    @property
    def trained(self) -> bool:
        return self.weight > 0

    def to_json(self) -> JsonDict:
        """As JSON values; `weight` and `why` only where they say more than `trained`."""
        out: JsonDict = {"id": self.id, "text": self.text, "trained": self.trained, "control": self.control}
        if self.weight not in (0.0, 1.0):
            out["weight"] = self.weight
        if self.why is not None:
            out["why"] = self.why
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentView:
    """One example inside a pack, or one that is not packed yet."""

    tokens: list[TokenView]
    number: int = 0
    """Inside the pack."""
    start: int = 0
    """First token inside the pack."""
    path: str | None = None
    """Of the input it came from, as the job wrote it."""
    source: str | None = None
    file: int | None = None
    row: int | None = None
    part: int | None = None

    @property
    def num_loss_tokens(self) -> int:
        return sum(token.trained for token in self.tokens)

    @property
    def origin(self) -> str:
        """Where it came from, in words."""
        if self.path is None:
            return "an example"
        return f"{self.path}, row {self.row}, part {self.part} (source {self.source})"

    def to_json(self) -> JsonDict:
        """As JSON values."""
        return {
            "segment": self.number,
            "start": self.start,
            "num_tokens": len(self.tokens),
            "num_loss_tokens": self.num_loss_tokens,
            "path": self.path,
            "source": self.source,
            "file": self.file,
            "row": self.row,
            "part": self.part,
            "tokens": [token.to_json() for token in self.tokens],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PackView:
    """One pack as a person reads it."""

    output: str
    pack: int
    """Over all shards in manifest order."""
    num_packs: int
    shard: str
    split: str
    seq_len: int
    num_segments: int
    num_tokens: int
    num_loss_tokens: int
    segments: list[SegmentView]
    """All of them, or the one that was asked for."""
    notes: list[str] = field(default_factory=list)
    """What a reader of the view must know, e.g. that the tokenizer could not be read."""

    @property
    def padding(self) -> int:
        """Tokens of the tail."""
        return self.seq_len - self.num_tokens

    @property
    def heading(self) -> str:
        """The pack in one line."""
        return f"pack {self.pack} of {self.num_packs}, split {self.split}, {self.shard}"

    @property
    def summary(self) -> str:
        """Its counts in one line."""
        tail = f"{self.padding:,} of padding" if self.padding else "no padding"
        segments = f"{self.num_segments} segment{'s' if self.num_segments != 1 else ''}"
        return (
            f"{segments}, {self.num_tokens:,} of {self.seq_len:,} tokens, {tail}, "
            f"{self.num_loss_tokens:,} trained ({self.num_loss_tokens / max(1, self.num_tokens):.1%})"
        )

    def to_json(self) -> JsonDict:
        """As JSON values."""
        return {
            "output": self.output,
            "pack": self.pack,
            "shard": self.shard,
            "split": self.split,
            "seq_len": self.seq_len,
            "num_segments": self.num_segments,
            "num_tokens": self.num_tokens,
            "num_loss_tokens": self.num_loss_tokens,
            "padding": self.padding,
            "segments": [segment.to_json() for segment in self.segments],
            "notes": list(self.notes),
        }

    def to_text(self, *, marks: bool | None = None) -> RenderableType:
        """For a rich console: trained tokens green, or between [[ and ]].

        Args:
            marks: True: marked; False: by colour alone; None: marked where the console has no colour.
        """
        from packsvc.view.text import pack_text

        return pack_text(self, marks=marks)

    def to_html(self) -> str:
        """A page of its own, that loads nothing."""
        from packsvc.view.page import pack_page

        return pack_page(self)

    def __str__(self) -> str:
        from packsvc.view.text import plain_text

        return plain_text(self)
