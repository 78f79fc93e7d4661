"""What a job is: the job file as checked models.

A job file is these models written down in YAML. Unknown keys are refused and the nearest known one is named.
Paths stay as the job wrote them, since they are part of the plan's identity; `PackJob.resolve` makes them
absolute against the folder of the job file. Only pydantic and a YAML reader are needed, so that a job can be
checked anywhere in milliseconds.
"""

from __future__ import annotations

import datetime
import difflib
import os
import re
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PrivateAttr,
    field_validator,
    model_validator,
)

SPLIT_NAME = re.compile(r"[a-z0-9_]+\Z")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class Format(StrEnum):
    """How a source's records are read as examples."""

    AUTO = "auto"
    MESSAGES = "messages"
    SHAREGPT = "sharegpt"
    ALPACA = "alpaca"
    PROMPT_COMPLETION = "prompt_completion"
    TEXT = "text"
    PRETOKENIZED = "pretokenized"


class Turns(StrEnum):
    WHOLE = "whole"
    EACH = "each"


class DroppedReasoning(StrEnum):
    NO_LOSS = "no_loss"
    TRAIN = "train"


class TrainOn(StrEnum):
    ASSISTANT = "assistant"
    LAST_ASSISTANT = "last_assistant"
    ALL = "all"


class Overlong(StrEnum):
    REJECT = "reject"
    TRUNCATE_RIGHT = "truncate_right"
    DROP_TURNS = "drop_turns"
    SPLIT = "split"
    ERROR = "error"


class Strategy(StrEnum):
    FFD = "ffd"
    FIRST_FIT_RANDOM = "first_fit_random"
    NEXT_FIT = "next_fit"


class ControlTokens(StrEnum):
    REJECT = "reject"
    ENCODE_AS_TEXT = "encode_as_text"


def parse_size(value: Any) -> Any:
    """Bytes from "256MB", "1.5 GiB" or a number; anything else is left to pydantic to refuse."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", value)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{value!r} is not a size; write for example 256MB or 1GiB")
    return int(Decimal(match[1]) * _UNITS[match[2].upper()])


def format_size(size_bytes: int) -> str:
    """The shortest exact spelling that `parse_size` reads back."""
    for unit in ("GB", "MB", "KB"):
        if size_bytes and size_bytes % _UNITS[unit] == 0:
            return f"{size_bytes // _UNITS[unit]}{unit}"
    return f"{size_bytes}B"


SizeBytes = Annotated[int, BeforeValidator(parse_size), PlainSerializer(format_size, return_type=str), Field(ge=1)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_default=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _name_nearest_key(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for key in data:
                if key not in cls.model_fields:
                    near = difflib.get_close_matches(str(key), list(cls.model_fields), n=1, cutoff=0.5)
                    hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(cls.model_fields)}"
                    raise ValueError(f"unknown key {key!r}{hint}")
        return data


class Source(_Model):
    """Files of one kind, under one name."""

    path: str | list[str] = Field(description="File, directory, glob or list of them; any fsspec URL.")
    name: str = Field(default="", description="Name in statistics; by default from the path.")
    format: Format = Field(default=Format.AUTO, description="How records are read as examples.")
    columns: dict[str, str] = Field(
        default_factory=dict, description="Our field: their column, e.g. messages: conversations."
    )
    weight: float = Field(default=1.0, ge=0, allow_inf_nan=False, description="2 = twice, 0.3 = a seeded 30 %.")
    where: dict[str, Any] = Field(
        default_factory=dict, description="column: value or [values]; the other rows are counted as filtered."
    )
    split: str | None = Field(default=None, description="Puts the whole source into one split.")

    @field_validator("path")
    @classmethod
    def _some_path(cls, value: str | list[str]) -> str | list[str]:
        if not value or (isinstance(value, list) and not all(value)):
            raise ValueError("a source needs a path")
        return value

    @property
    def paths(self) -> list[str]:
        """Always a list."""
        return [self.path] if isinstance(self.path, str) else list(self.path)


class Packing(_Model):
    """How segments are laid into packs."""

    strategy: Strategy = Field(
        default=Strategy.FFD, description="ffd is fullest; first_fit_random mixes lengths; next_fit keeps neighbours."
    )
    max_segments: int | None = Field(default=None, ge=1, description="At most this many segments in a pack.")
    align: int = Field(default=1, ge=1, description="Reserve room to pad every segment to a multiple of this.")
    group_examples: int = Field(default=65536, ge=1, description="Rows in a group at most.")


class Limits(_Model):
    """When a job gives up."""

    max_reject_fraction: float = Field(default=0.01, ge=0, le=1, description="Rejected rows, overlong ones aside.")
    max_overlong_fraction: float = Field(default=0.1, ge=0, le=1, description="Overlong rows, rejected or cut.")


class PackJob(_Model):
    """A packing job: the job file, checked."""

    name: str = Field(default="packsvc", description="Name of the data set.")
    tokenizer: str = Field(description="Directory or hub id of a tokenizer.")
    revision: str | None = Field(default=None, description="Hub revision.")
    chat_template: str | None = Field(default=None, description="A template file; default: the tokenizer's own.")
    template_kwargs: dict[str, Any] = Field(default_factory=dict, description="Passed to the template.")
    date: datetime.date | None = Field(default=None, description="What templates see as today.")
    sources: list[Source] = Field(min_length=1, description="Where examples come from.")
    turns: Turns = Field(default=Turns.WHOLE, description="One segment a row, or one per user turn.")
    splits: dict[str, float] = Field(default_factory=lambda: {"train": 1.0}, description="Name: share.")
    dropped_reasoning: DroppedReasoning = Field(
        default=DroppedReasoning.NO_LOSS, description="Trained turns whose reasoning the template leaves out."
    )
    train_on: TrainOn = Field(default=TrainOn.ASSISTANT, description="What the loss covers.")
    seq_len: int = Field(default=4096, ge=2, le=2**30, description="Tokens in a pack.")
    overlong: Overlong = Field(default=Overlong.REJECT, description="What becomes of rows over seq_len.")
    packing: Packing = Field(default_factory=Packing)
    seed: int = Field(default=0, ge=0, lt=2**63)
    output: str = Field(default="./out", description="Any fsspec URL.")
    shard_size: SizeBytes = Field(default=256_000_000, description="Size of a shard at 2 bytes a token.")
    compression: str = Field(default="zstd:1", description="zstd:LEVEL, lz4, snappy or none.")
    loss_weights: bool = Field(default=False, description="Write the loss_weight column.")
    control_tokens: ControlTokens = Field(default=ControlTokens.REJECT, description="Control tokens typed in content.")
    audit_fraction: float = Field(default=0.01, ge=0, le=1, description="Rows encoded again by the slow method.")
    limits: Limits = Field(default_factory=Limits)

    _base: str = PrivateAttr(default_factory=os.getcwd)

    @field_validator("compression")
    @classmethod
    def _known_codec(cls, value: str) -> str:
        if not re.fullmatch(r"none|lz4|snappy|zstd(:([1-9]|1[0-9]|2[0-2]))?", value):
            raise ValueError(f"{value!r} is not known; use zstd:1 to zstd:22, lz4, snappy or none")
        return "zstd:1" if value == "zstd" else value

    @field_validator("splits")
    @classmethod
    def _shares(cls, value: dict[str, float]) -> dict[str, float]:
        for name, share in value.items():
            if not SPLIT_NAME.match(name):
                raise ValueError(f"split {name!r} must match [a-z0-9_]+")
            if not 0 <= share <= 1:
                raise ValueError(f"share of split {name!r} must lie between 0 and 1, not {share}")
        if abs(sum(value.values()) - 1) > 1e-9:
            raise ValueError(f"shares of splits must add up to 1, not {sum(value.values()):g}")
        return value

    @model_validator(mode="after")
    def _whole(self) -> PackJob:
        names: list[str] = []
        for index, source in enumerate(self.sources):
            if source.split is not None and source.split not in self.splits:
                raise ValueError(
                    f"sources.{index}.split: {source.split!r} is not among splits ({', '.join(self.splits)})"
                )
            name = source.name or default_source_name(source.paths[0])
            if name in names:
                if source.name:
                    raise ValueError(f"sources.{index}.name: {name!r} stands twice")
                name = next(f"{name}-{n}" for n in range(2, len(names) + 3) if f"{name}-{n}" not in names)
            names.append(name)
            if name != source.name:
                self.sources[index] = source.model_copy(update={"name": name})
        if self.packing.align > self.seq_len:
            raise ValueError(f"packing.align {self.packing.align} is above seq_len {self.seq_len}")
        return self

    @property
    def base(self) -> str:
        """Folder that relative paths start from."""
        return self._base

    def with_base(self, base: str | os.PathLike[str]) -> PackJob:
        """The same job, with relative paths starting from `base`."""
        copy = self.model_copy(deep=True)
        copy._base = os.path.abspath(base)
        return copy

    def resolve(self, path: str) -> str:
        """`path` as an absolute local path, or the URL that it is."""
        if is_url(path):
            return path[len("file://") :] if path.startswith("file://") else path
        return os.path.normpath(os.path.join(self._base, os.path.expanduser(path)))

    @property
    def output_url(self) -> str:
        return self.resolve(self.output)

    @property
    def tokenizer_path(self) -> str:
        """The tokenizer's folder if there is one, else the hub id as it stands."""
        local = self.resolve(self.tokenizer)
        return local if os.path.isdir(local) else self.tokenizer

    @property
    def split_names(self) -> list[str]:
        """Sorted; `EncodedBatch.split` indexes it."""
        return sorted(self.splits)

    def dump(self) -> dict[str, Any]:
        """The resolved job as plain JSON values; `PackJob.model_validate` reads it back."""
        return self.model_dump(mode="json")

    def identity(self) -> dict[str, Any]:
        """What of the job shapes the output, and so enters plan_id."""
        return {k: v for k, v in self.dump().items() if k not in ("name", "output", "limits", "audit_fraction")}


def is_url(path: str) -> bool:
    """True for fsspec URLs such as s3://bucket/key and memory://x."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path) is not None or "::" in path


def default_source_name(path: str) -> str:
    """The stem of a file, or the folder that a glob or a directory stands for.

    >>> default_source_name("./data/chat/*.jsonl.gz"), default_source_name("data/alpaca.json.gz")
    ('chat', 'alpaca')
    """
    parts = [p for p in re.split(r"[/\\]+", path) if p not in ("", ".", "..")]
    while parts and any(c in parts[-1] for c in "*?["):
        parts.pop()
    if not parts:
        return "source"
    name = re.sub(r"\.(gz|zst)\Z", "", parts[-1])
    name = re.sub(r"\.(jsonl|json|ndjson|parquet|arrow|ipc|feather|csv|txt)\Z", "", name)
    return name or Path(path).name
