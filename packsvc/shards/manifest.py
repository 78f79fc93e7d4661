"""The manifest: the record of all shards, written once, last. Readers believe only this.

Its keys are contract, and more may be added: what this version does not know is kept and written back. Reading
it checks types, counts and paths, since a manifest may come from anywhere; whether its totals agree with its
shard list is `disagreements`, which readers and `validate` each treat in their own way.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packsvc.errors import FormatError
from packsvc.shards.entries import InputEntry, RejectEntry, ShardEntry, TableEntry
from packsvc.shards.layout import FORMAT_VERSION
from packsvc.shards.parsing import Value
from packsvc.storage import Store
from packsvc.types import JsonDict, TokenizerFacts

MANIFEST, PLAN = "manifest.json", "plan.json"

TOTAL_KEYS = (
    "rows", "packed", "rejected", "rejected_parts", "filtered", "left_out", "rejected_by_reason", "truncated",
    "split", "reasoning_dropped", "edge_tokens", "turns_without_stop", "packs", "segments", "tokens", "loss_tokens",
    "encoded_tokens", "repeated_tokens", "padding_tokens", "cut_tokens", "rejected_tokens", "efficiency",
    "max_segments", "max_segment_tokens", "min_pack_tokens", "sum_squared_lengths",
)  # fmt: skip
"""What `totals` holds, in order."""
PACK_KEYS = (
    "packs", "segments", "tokens", "loss_tokens", "padding_tokens", "efficiency", "max_segments",
    "max_segment_tokens", "min_pack_tokens", "sum_squared_lengths",
)  # fmt: skip
"""Those that concern packs: what each entry of `splits` holds."""
SOURCE_KEYS = (
    "rows", "packed", "rejected", "rejected_parts", "filtered", "left_out", "rejected_by_reason", "truncated",
    "split", "reasoning_dropped", "edge_tokens", "turns_without_stop", "segments", "tokens", "loss_tokens",
    "encoded_tokens", "repeated_tokens", "cut_tokens", "rejected_tokens", "max_segment_tokens", "sum_squared_lengths",
)  # fmt: skip
"""Those that count rows, segments and tokens of a source: what each entry of `sources` holds."""

_TOKENIZER_KEYS = tuple(f.name for f in fields(TokenizerFacts))


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What stands in `manifest.json`."""

    name: str
    packsvc_version: str
    plan_id: str
    seq_len: int
    align: int
    seed: int
    config: JsonDict
    """The resolved job."""
    versions: dict[str, str]
    """Of the libraries that shape tokens or bytes."""
    tokenizer: TokenizerFacts
    inputs: tuple[InputEntry, ...]
    """`segment_file` counts in these."""
    shards: tuple[ShardEntry, ...]
    """In the order readers count packs in."""
    rejects: tuple[RejectEntry, ...]
    totals: JsonDict
    """Keys: `TOTAL_KEYS`."""
    splits: dict[str, JsonDict]
    """Keys: `PACK_KEYS`."""
    sources: dict[str, JsonDict]
    """Keys: `SOURCE_KEYS`."""
    tables: dict[str, TableEntry] = field(default_factory=dict)
    """Parquet tables about the whole output: `packs` and `lengths`."""
    format: int = FORMAT_VERSION
    extra: JsonDict = field(default_factory=dict)
    """Keys that this version does not know."""

    @cached_property
    def num_packs(self) -> int:
        return int(self.pack_offsets[-1])

    @cached_property
    def pack_offsets(self) -> NDArray[np.int64]:
        """(shards + 1,) number of the first pack of each shard, counted over all shards in manifest order."""
        sizes = np.array([shard.num_packs for shard in self.shards], dtype=np.int64)
        return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(sizes)))

    @cached_property
    def digest(self) -> str:
        """sha256 that binds a reader's state to this data: plan_id and the shards' digests, in order.

        Dates, names and the inputs' mtimes do not enter.
        """
        bound = [self.format, self.plan_id, [[shard.sha256, shard.num_packs] for shard in self.shards]]
        return hashlib.sha256(json.dumps(bound, separators=(",", ":")).encode()).hexdigest()

    def locate(self, pack: int) -> tuple[int, int]:
        """Shard index and number inside the shard of a pack. Raises IndexError."""
        if not 0 <= pack < self.num_packs:
            raise IndexError(f"no pack {pack}; there are {self.num_packs}, numbered from 0")
        shard = int(np.searchsorted(self.pack_offsets, pack, side="right")) - 1
        return shard, pack - int(self.pack_offsets[shard])

    def shards_of(self, split: str) -> tuple[ShardEntry, ...]:
        """The shards of a split, in manifest order. Raises FormatError naming the splits there are."""
        if split not in self.splits:
            raise FormatError(f"there is no split {split!r}; this output has {', '.join(self.splits) or 'none'}")
        return tuple(shard for shard in self.shards if shard.split == split)

    @property
    def loss_weights(self) -> bool | None:
        """Whether its shards have the column `loss_weight`; None: the job does not say."""
        found = self.config.get("loss_weights")
        return None if found is None else bool(found)

    def disagreements(self) -> list[str]:
        """Where totals and splits do not follow from the shard list; empty when they do."""
        found = []
        for name, counts in [(None, self.totals), *self.splits.items()]:
            shards = [shard for shard in self.shards if name is None or shard.split == name]
            for key in ("packs", "segments", "tokens", "loss_tokens"):
                total = sum(getattr(shard, f"num_{key}") for shard in shards)
                if counts.get(key) != total:
                    place = "totals" if name is None else f"splits.{name}"
                    found.append(f"{place}.{key} is {counts.get(key)}, the shards add up to {total}")
        strangers = {shard.split for shard in self.shards} - set(self.splits)
        return found + [
            f"shards belong to the split {name!r}, which splits does not list" for name in sorted(strangers)
        ]

    def to_json(self) -> JsonDict:
        """As plain JSON values, in the order of the contract; `from_json` gives the same manifest."""
        tokenizer = {key: getattr(self.tokenizer, key) for key in _TOKENIZER_KEYS}
        extra = dict(self.extra)
        tokenizer |= extra.pop("tokenizer", {})
        return {
            "format": self.format,
            "name": self.name,
            "packsvc_version": self.packsvc_version,
            "plan_id": self.plan_id,
            "seq_len": self.seq_len,
            "align": self.align,
            "seed": self.seed,
            "config": self.config,
            "versions": self.versions,
            "tokenizer": tokenizer,
            "inputs": [entry.to_json() for entry in self.inputs],
            "shards": [entry.to_json() for entry in self.shards],
            "rejects": [entry.to_json() for entry in self.rejects],
            "totals": self.totals,
            "splits": self.splits,
            "sources": self.sources,
            "tables": {name: entry.to_json() for name, entry in self.tables.items()},
            **extra,
        }

    @classmethod
    def from_json(cls, data: Any, *, where: str = MANIFEST) -> Manifest:
        """A manifest from plain JSON values. Raises FormatError naming the key that is wrong, and how."""
        root = Value(data, where)
        version = root.get("format").integer()
        if version != FORMAT_VERSION:
            raise FormatError(
                f"{where}: format {version}; this packsvc reads format {FORMAT_VERSION}. "
                "Read it with the version that wrote it, or pack again"
            )
        tokenizer = root.get("tokenizer")
        extra = root.rest(tuple(f.name for f in fields(cls)))
        if more := tokenizer.rest(_TOKENIZER_KEYS):
            extra["tokenizer"] = more
        tables = root.get("tables").table() if "tables" in root.table() else {}
        return cls(
            format=version,
            name=root.get("name").text(),
            packsvc_version=root.get("packsvc_version").text(),
            plan_id=root.get("plan_id").text(),
            seq_len=root.get("seq_len").integer(least=1),
            align=root.get("align").integer(least=1),
            seed=root.get("seed").integer(),
            config=root.get("config").object(),
            versions={key: value.text() for key, value in root.get("versions").table().items()},
            tokenizer=_tokenizer(tokenizer),
            inputs=tuple(InputEntry.read(value) for value in root.get("inputs").items()),
            shards=tuple(ShardEntry.read(value) for value in root.get("shards").items()),
            rejects=tuple(RejectEntry.read(value) for value in root.get("rejects").items()),
            totals=_counts(root.get("totals"), TOTAL_KEYS),
            splits={name: _counts(value, PACK_KEYS) for name, value in root.get("splits").table().items()},
            sources={name: _counts(value, SOURCE_KEYS) for name, value in root.get("sources").table().items()},
            tables={name: TableEntry.read(value) for name, value in tables.items()},
            extra=extra,
        )

    @classmethod
    def load(cls, out: Store | str, storage_options: Mapping[str, Any] | None = None) -> Manifest:
        """The manifest of a finished output.

        Raises:
            FormatError: There is no such folder, it is not packsvc's, it is unfinished, or its manifest is
                malformed or of another format; the message says which, and what to do.
            StorageError: The storage does not answer.
        """
        store = out if isinstance(out, Store) else Store(str(out), storage_options=storage_options)
        if store.is_local and store.fs.isfile(store.path("")):
            raise FormatError(f"{store.url}: is a file; name the folder that `packsvc pack` wrote")
        try:
            data = store.read(MANIFEST)
        except FileNotFoundError:
            raise FormatError(_why_missing(store)) from None
        where = store.describe(MANIFEST)
        try:
            parsed = json.loads(data)
        except ValueError as error:
            raise FormatError(f"{where}: is no JSON ({error}); the file is damaged, pack again") from error
        return cls.from_json(parsed, where=where)


def _why_missing(store: Store) -> str:
    """What to say of a place without a manifest."""
    if store.info(PLAN) is not None:
        return (
            f"{store.url}: the run is unfinished, there is a plan but no manifest; run `packsvc pack` again to resume"
        )
    if store.list(""):
        return f"{store.url}: is not a packsvc output, there is no {MANIFEST} in it"
    if store.is_local and store.fs.isdir(store.path("")):
        return f"{store.url}: is not a packsvc output, the folder is empty"
    return f"{store.url}: there is no such folder"


def _tokenizer(value: Value) -> TokenizerFacts:
    revision = value.get("revision")
    return TokenizerFacts(
        id=value.get("id").text(),
        revision=None if revision.is_null else revision.text(),
        fingerprint=value.get("fingerprint").text(),
        files_sha256={name: digest.text() for name, digest in value.get("files_sha256").table().items()},
        template_sha256=value.get("template_sha256").text(),
        vocab_size=value.get("vocab_size").integer(),
        pad_id=value.get("pad_id").integer(most=2**31 - 1),
        stop_ids=[stop.integer() for stop in value.get("stop_ids").items()],
        backend=value.get("backend").text(),
    )


def _counts(value: Value, keys: Sequence[str]) -> JsonDict:
    """A dict of counts that has at least `keys`."""
    for key in keys:
        entry = value.get(key)
        if key == "rejected_by_reason":
            for reason in entry.table().values():
                reason.integer()
        elif key == "efficiency":
            entry.number()
        else:
            entry.integer()
    return value.object()
