"""Goes through an output shard by shard and writes what another trainer reads.

Memory holds one row group; a file is written on the local disk and appears whole in the destination. The same
output gives the same bytes. Everything that was read is counted and compared with the manifest, so that nothing is
left out unseen; `export.json` is written last and says what was made.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from packsvc.errors import ConfigError, DamageError, FormatError
from packsvc.export.examples import Examples
from packsvc.export.layout import Format, Source
from packsvc.export.megatron import Megatron
from packsvc.export.olmo import Olmo
from packsvc.export.record import RECORD, UNFINISHED, Exported, ExportedFile, Totals
from packsvc.export.segments import Segments, take_apart
from packsvc.export.torchtune import Torchtune
from packsvc.export.trl import Trl
from packsvc.export.weights import refuse_fractional_weights
from packsvc.shards import Manifest, ShardEntry, ShardReader
from packsvc.storage import Store

FORMATS: dict[str, type[Format]] = {
    "trl": Trl,
    "megatron": Megatron,
    "torchtune": Torchtune,
    "olmo": Olmo,
    "examples": Examples,
}
"""By the name that `--to` takes."""
CARRY_WEIGHTS = {"examples"}
COLUMNS = ("input_ids", "loss_mask", "cu_seqlens", "segment_file", "segment_row", "segment_part")

Watch = Callable[[int, int, int], None]
"""Called with shards done, shards in all, and tokens so far."""


def export_dataset(
    out: str,
    destination: str,
    *,
    to: str,
    split: str | None = None,
    pad_to_multiple: int = 1,
    eos_id: int | None = None,
    watch: Watch | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Exported:
    """Write a finished output as another trainer reads it.

    Args:
        out: Folder or URL of a packed output.
        destination: Folder or URL; empty, or left unfinished by the same export.
        to: One of `FORMATS`.
        split: Only this one; None: all of them, each in a folder of its name where there are several.
        pad_to_multiple: Megatron: store segments padded to a multiple of this, plus one token.
        eos_id: Megatron: the EOS of the tokenizer that will train.
        watch: Is told of every shard that is done.
        storage_options: For fsspec.

    Raises:
        ConfigError: An argument makes no sense, or the destination holds something else.
        FormatError: `out` is not a finished output, has no such split, or has loss weights that the format cannot say.
        DamageError: A shard is damaged, or what was read is not what the manifest counts.
    """
    _check_arguments(to, pad_to_multiple, eos_id)
    store = Store(out, storage_options=storage_options)
    manifest = Manifest.load(store)
    _check_totals(manifest, store)
    splits = _splits(manifest, split, where=out)
    _check_eos(manifest, eos_id)
    target = Store(destination, storage_options=storage_options)
    identity = {
        "format": to,
        "digest": manifest.digest,
        "splits": list(splits),
        "pad_to_multiple": pad_to_multiple,
        "eos_id": eos_id,
    }
    formats = {
        name: FORMATS[to](
            Source(
                manifest=manifest, split=name, num_shards=len(shards), pad_to_multiple=pad_to_multiple, eos_id=eos_id
            )
        )
        for name, shards in splits.items()
    }
    _check_destination(target, identity, store)
    if to not in CARRY_WEIGHTS:
        for shard in (shard for shards in splits.values() for shard in shards):
            with ShardReader.of(store, shard, manifest) as reader:
                refuse_fractional_weights(reader, to=to)
    target.publish(UNFINISHED, _json(identity))
    run = _Export(store, target, manifest, num_shards=sum(map(len, splits.values())), watch=watch)
    totals = {
        name: run.split(name, formats[name], shards, folder=f"{name}/" if len(splits) > 1 else "")
        for name, shards in splits.items()
    }
    made = Exported(
        destination=destination,
        format=to,
        name=manifest.name,
        plan_id=manifest.plan_id,
        seq_len=manifest.seq_len,
        digest=manifest.digest,
        tokenizer=manifest.tokenizer.fingerprint,
        splits=totals,
        files=tuple(run.files),
        notes=tuple(dict.fromkeys(note for form in formats.values() for note in form.notes())),
    )
    target.publish(RECORD, _json(made.to_json()))
    target.remove(UNFINISHED)
    return made


class _Export:
    """One run: what it reads from, where it writes, and the files it made so far."""

    def __init__(
        self, store: Store, target: Store, manifest: Manifest, *, num_shards: int, watch: Watch | None
    ) -> None:
        self.files: list[ExportedFile] = []
        self._store, self._target, self._manifest = store, target, manifest
        self._num_shards, self._watch = num_shards, watch
        self._done = self._tokens = 0

    def split(self, name: str, form: Format, shards: tuple[ShardEntry, ...], *, folder: str) -> Totals:
        """Export one split; its totals are the manifest's."""
        totals = Totals(packs=0, segments=0, tokens=0, loss_tokens=0)
        for number, shard in enumerate(shards):
            totals = totals.plus(self._shard(form, shard, number, folder))
        for file, data in form.extra_files().items():
            self._target.publish(folder + file, data)
            self.files.append(_file(folder + file, len(data), hashlib.sha256(data).hexdigest(), None))
        wanted = {key: self._manifest.splits[name][key] for key in Totals.__slots__}
        found = {key: getattr(totals, key) for key in Totals.__slots__}
        if wanted != found:
            raise DamageError(f"split {name}: {found} were read, the manifest says {wanted}; run `packsvc validate`")
        return totals

    def _shard(self, form: Format, shard: ShardEntry, number: int, folder: str) -> Totals:
        counter = _Counter()
        with tempfile.TemporaryDirectory(prefix="packsvc-export-") as scratch, self._open(shard) as reader:
            for path in form.write(counter.counting(_segments(reader)), number=number, folder=Path(scratch)):
                with open(path, "rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                size_bytes = path.stat().st_size
                self._target.publish_file(folder + path.name, str(path))
                self.files.append(_file(folder + path.name, size_bytes, digest, shard.path))
                path.unlink()
        self._done += 1
        self._tokens += counter.totals.tokens
        if self._watch is not None:
            self._watch(self._done, self._num_shards, self._tokens)
        return counter.totals

    def _open(self, shard: ShardEntry) -> ShardReader:
        return ShardReader.of(self._store, shard, self._manifest)


class _Counter:
    """Counts what goes through."""

    def __init__(self) -> None:
        self.totals = Totals(packs=0, segments=0, tokens=0, loss_tokens=0)

    def counting(self, chunks: Iterator[Segments]) -> Iterator[Segments]:
        for segments in chunks:
            self.totals = self.totals.plus(
                Totals(
                    packs=segments.num_packs,
                    segments=len(segments.lengths),
                    tokens=len(segments.ids),
                    loss_tokens=int(np.count_nonzero(segments.mask)),
                )
            )
            yield segments


def _segments(reader: ShardReader) -> Iterator[Segments]:
    columns = [*COLUMNS, "loss_weight"] if reader.loss_weights else list(COLUMNS)
    first = 0
    for packs in reader.chunks(columns):
        yield take_apart(packs, where=reader.where, first_pack=first)
        first += packs.num_packs


def _file(path: str, size_bytes: int, sha256: str, shard: str | None) -> ExportedFile:
    return ExportedFile(path=path, size_bytes=size_bytes, sha256=sha256, shard=shard)


def _check_arguments(to: str, pad_to_multiple: int, eos_id: int | None) -> None:
    if to not in FORMATS:
        raise ConfigError(f"--to {to}: there is no such format; there are {', '.join(FORMATS)}")
    if pad_to_multiple < 1:
        raise ConfigError(f"--pad-to-multiple {pad_to_multiple}: it must be at least 1")
    if to != "megatron" and (pad_to_multiple != 1 or eos_id is not None):
        raise ConfigError(f"--pad-to-multiple and --eos-id are for --to megatron, not {to}")


def _check_totals(manifest: Manifest, store: Store) -> None:
    if wrong := manifest.disagreements():
        raise FormatError(f"{store.url}: its manifest contradicts itself: {wrong[0]}; run `packsvc validate`")


def _splits(manifest: Manifest, split: str | None, *, where: str) -> dict[str, tuple[ShardEntry, ...]]:
    """The splits to export that have packs, by name, with their shards in manifest order."""
    names = sorted(manifest.splits) if split is None else [split]
    found = {name: shards for name in names if (shards := manifest.shards_of(name))}
    if not found:
        raise FormatError(f"{where}: {'it' if split is None else f'split {split}'} has no packs to export")
    return found


def _check_eos(manifest: Manifest, eos_id: int | None) -> None:
    size = manifest.tokenizer.vocab_size
    if eos_id is not None and not 0 <= eos_id < size:
        raise ConfigError(f"--eos-id {eos_id}: the tokenizer has ids from 0 to {size - 1}")


def _check_destination(target: Store, identity: dict[str, Any], source: Store) -> None:
    """Nothing may stand there but what the same export left unfinished, and it lies outside of what is exported."""
    inside, outside = (_real(store) for store in (target, source))
    if inside.startswith(outside + "/"):
        raise ConfigError(
            f"{target.url}: lies inside the packed output {source.url}, which would no longer be valid; name a folder "
            "outside of it"
        )
    if target.is_local and target.fs.isfile(target.path("")):
        raise ConfigError(f"{target.url}: is a file; name a folder for the export")
    standing = [file.name for file in target.list()]
    if not standing:
        return
    if RECORD not in standing and UNFINISHED in standing:
        with contextlib.suppress(ValueError):
            if json.loads(target.read(UNFINISHED)) == identity:
                return
        raise ConfigError(f"{target.url}: holds another unfinished export; remove it or name another folder")
    raise ConfigError(
        f"{target.url}: is not empty ({standing[0]}, {len(standing)} files in all); an export never writes over "
        "anything, name another folder"
    )


def _real(store: Store) -> str:
    """Where a store is, links followed."""
    return os.path.realpath(store.path("")) if store.is_local else str(store.fs.unstrip_protocol(store.path("")))


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1, ensure_ascii=False).encode() + b"\n"
