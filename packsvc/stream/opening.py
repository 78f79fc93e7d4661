"""Opens packed outputs for reading: manifests checked, mixtures and tokenizers compared. Reads no shard."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packsvc.errors import ConfigError, FormatError
from packsvc.shards import Manifest, ShardEntry, shard_of_path
from packsvc.storage import Store
from packsvc.stream.cache import CacheSettings, ShardCache
from packsvc.stream.options import Unit
from packsvc.stream.source import PackSource

Out = str | os.PathLike[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One packed output and the split that is read of it."""

    name: str
    """As the caller gave it."""
    share: float | None
    """None unless several are mixed."""
    manifest: Manifest
    storage_options: Mapping[str, Any] | None
    cache: CacheSettings | None
    """None for an output on a local disk, and where there is to be none."""
    shards: NDArray[np.int64]
    """Indices of the split's shards in the manifest, empty shards left out."""

    @property
    def first_packs(self) -> NDArray[np.int64]:
        """(shards,) number of each shard's first pack."""
        return self.manifest.pack_offsets[self.shards]

    @property
    def sizes(self) -> NDArray[np.int64]:
        """(shards,) packs in each shard."""
        return np.diff(self.manifest.pack_offsets)[self.shards]

    @property
    def num_packs(self) -> int:
        return int(self.sizes.sum())

    def store(self) -> Store:
        """The folder, opened anew: file systems are not shared with another process."""
        return Store(self.name, storage_options=self.storage_options)

    def source(self) -> PackSource:
        """Its packs, for this process."""
        store = self.store()
        cache = None if self.cache is None else ShardCache(store, self.manifest, self.cache)
        return PackSource(store, self.manifest, cache)

    def mean_per_pack(self, unit: Unit) -> float:
        """Units in a pack, on average over the split."""
        if unit is Unit.PACKS:
            return 1.0
        entries = [self.manifest.shards[i] for i in self.shards]
        return sum(int(getattr(entry, f"num_{unit}")) for entry in entries) / self.num_packs


def open_outputs(
    out: Out | Sequence[tuple[Out, float]],
    *,
    split: str,
    storage_options: Mapping[str, Any] | None,
    cache: CacheSettings | None = None,
) -> list[Output]:
    """The outputs to read.

    Args:
        out: One output, or several with their shares.
        split: Which split of each.
        storage_options: For fsspec.
        cache: Where shards of remote outputs are kept.

    Raises:
        ConfigError: The argument makes no sense, the split is not there or is empty.
        FormatError: An output is missing, unfinished, foreign, or its manifest contradicts itself; mixed outputs
            do not fit together.
    """
    if isinstance(out, (str, os.PathLike)):
        return [_open(os.fspath(out), None, split=split, storage_options=storage_options, cache=cache)]
    pairs = _pairs(out)
    names = [name for name, _ in pairs]
    if doubled := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{doubled[0]} is given twice; give it once, with the sum of its shares")
    outputs = [_open(name, share, split=split, storage_options=storage_options, cache=cache) for name, share in pairs]
    for other in outputs[1:]:
        _same(outputs[0], other)
    return outputs


def check_tokenizer(outputs: Sequence[Output], tokenizer: object) -> None:
    """Refuse outputs that another tokenizer than the trainer's encoded. Raises FormatError with both fingerprints."""
    fingerprint = tokenizer if isinstance(tokenizer, str) and _is_sha256(tokenizer) else _fingerprint(tokenizer)
    for output in outputs:
        theirs = output.manifest.tokenizer
        if theirs.fingerprint != fingerprint:
            raise FormatError(
                f"{output.name}: encoded with the tokenizer {theirs.id}, fingerprint {theirs.fingerprint}; the one "
                f"given has fingerprint {fingerprint}. Its ids mean other tokens: train with the output's tokenizer, "
                "or pack again"
            )


def _pairs(out: Sequence[tuple[Out, float]]) -> list[tuple[str, float]]:
    try:
        pairs = [(os.fspath(name), float(share)) for name, share in out]
    except (TypeError, ValueError):
        raise ConfigError(f"{out!r}: give one output, or a list of (output, share) pairs") from None
    if not pairs:
        raise ConfigError("there is no output to read: the list is empty")
    for name, share in pairs:
        if not 0 < share < float("inf"):
            raise ConfigError(f"{name}: its share is {share}; it must be a number above 0")
    return pairs


def _open(
    name: str,
    share: float | None,
    *,
    split: str,
    storage_options: Mapping[str, Any] | None,
    cache: CacheSettings | None,
) -> Output:
    store = Store(name, storage_options=storage_options)
    manifest = Manifest.load(store)
    if wrong := manifest.disagreements():
        raise FormatError(f"{name}/manifest.json contradicts itself: {'; '.join(wrong[:3])}. Pack again")
    _check_shards(name, manifest.shards)
    if split not in manifest.splits:
        raise ConfigError(f"{name}: there is no split {split!r}; it has {', '.join(manifest.splits) or 'none'}")
    shards = [i for i, entry in enumerate(manifest.shards) if entry.split == split and entry.num_packs]
    if not shards:
        raise ConfigError(f"{name}: the split {split!r} has no packs")
    if store.is_local:
        cache = None
    if cache is not None:
        ShardCache(store, manifest, cache)  # refuses a limit that holds no shard, now and not in a reading thread
    return Output(
        name=name,
        share=share,
        manifest=manifest,
        storage_options=storage_options,
        cache=cache,
        shards=np.array(shards, dtype=np.int64),
    )


def _check_shards(name: str, shards: Sequence[ShardEntry]) -> None:
    """Each line of the list names a shard of its own, of its split and content."""
    seen: set[str] = set()
    for entry in shards:
        shard = shard_of_path(entry.path)
        if shard is None or not shard.startswith(f"{entry.split}-"):
            raise FormatError(f"{name}/manifest.json: {entry.path} is no name of a shard of the split {entry.split!r}")
        if not entry.path.endswith(f"-{entry.sha256[:12]}.parquet"):
            raise FormatError(f"{name}/manifest.json: {entry.path} is not named after its sha256 {entry.sha256}")
        if entry.path in seen:
            raise FormatError(f"{name}/manifest.json: {entry.path} is listed twice; its packs would be read twice")
        seen.add(entry.path)


def _same(one: Output, other: Output) -> None:
    """Mixed outputs must agree on what a token is and how long a row is."""
    a, b = one.manifest, other.manifest
    pairs = [
        ("tokenizer fingerprint", a.tokenizer.fingerprint, b.tokenizer.fingerprint),
        ("seq_len", a.seq_len, b.seq_len),
        ("align", a.align, b.align),
    ]
    for what, mine, theirs in pairs:
        if mine != theirs:
            raise FormatError(
                f"{one.name} and {other.name} cannot be mixed: {what} is {mine} and {theirs}; pack one of them again"
            )


def _is_sha256(text: str) -> bool:
    return len(text) == 64 and all(c in "0123456789abcdef" for c in text)


def _fingerprint(tokenizer: object) -> str:
    # transformers is loaded only for those who ask; reading packs needs none of it.
    from packsvc.encode import fingerprint, read_fingerprint

    if isinstance(tokenizer, (str, os.PathLike)):
        return read_fingerprint(os.fspath(tokenizer))
    try:
        return fingerprint(tokenizer)
    except AttributeError:
        raise ConfigError(
            f"tokenizer is a {type(tokenizer).__name__}; give a fast tokenizer of transformers, a folder, a hub id, or "
            "the fingerprint that the manifest has under tokenizer"
        ) from None
