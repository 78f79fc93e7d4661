"""From a packed output and a pack's number to what is shown of it."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from packsvc.config import parse_job
from packsvc.encode import LoadedTokenizer, load_tokenizer
from packsvc.errors import ConfigError, EncodeError, PacksvcError
from packsvc.shards import PLAN, Manifest, ShardReader
from packsvc.storage import Store
from packsvc.types import PackColumns
from packsvc.view.records import PackView, SegmentView, TokenView
from packsvc.view.words import Words


def show(
    out: str | os.PathLike[str],
    pack: int = 0,
    segment: int | None = None,
    *,
    why: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> PackView:
    """One pack as a person reads it.

    Args:
        out: Folder or URL that a job wrote.
        pack: Number over all shards in manifest order.
        segment: Only this one of its segments; None: all.
        why: Also tell why each token is trained or not; reads the sources again.
        storage_options: For fsspec.

    Raises:
        ConfigError: There is no such pack or segment.
        FormatError: No manifest, an unfinished or a foreign output.
        DamageError: The shard is gone or damaged.
    """
    store = Store(os.fspath(out), storage_options=storage_options)
    manifest = Manifest.load(store)
    try:
        index, inside = manifest.locate(pack)
    except IndexError as error:
        raise ConfigError(f"{store.url}: {error}") from None
    entry = manifest.shards[index]
    with ShardReader.of(store, entry, manifest) as reader:
        columns = reader.read(inside, inside + 1)
    count = int(columns.num_segments[0])
    if segment is not None and not 0 <= segment < count:
        raise ConfigError(f"pack {pack} has no segment {segment}; there are {count}, numbered from 0")
    words, notes = words_of(store, manifest)
    chosen = range(count) if segment is None else [segment]
    segments = [_segment(columns, manifest, number, words) for number in chosen]
    if why:
        segments = with_reasons(segments, store, notes)
    return PackView(
        output=store.url,
        pack=pack,
        num_packs=manifest.num_packs,
        shard=entry.path,
        split=entry.split,
        seq_len=manifest.seq_len,
        num_segments=count,
        num_tokens=int(columns.num_tokens[0]),
        num_loss_tokens=int(columns.num_loss_tokens[0]),
        segments=segments,
        notes=notes,
    )


def view_tokens(
    ids: Sequence[int], weights: Sequence[float], *, words: Words | None, why: Sequence[str] | None = None
) -> list[TokenView]:
    """Tokens with their texts.

    Args:
        ids: Token ids.
        weights: What each counts in the loss, 0 or False where it is not trained.
        words: Texts; None: the ids stand in for them.
        why: The reason of each, where it is known.
    """
    trained = [weight > 0 for weight in weights]
    found = words.of(ids, apart=trained) if words is not None else None
    return [
        TokenView(
            id=int(token),
            text=found[at].text if found is not None else f"{token} ",
            weight=float(weights[at]),
            control=found is not None and found[at].control,
            why=why[at] if why is not None else None,
        )
        for at, token in enumerate(ids)
    ]


def view_example(
    ids: Sequence[int], weights: Sequence[float], *, loaded: LoadedTokenizer, why: Sequence[str] | None = None
) -> SegmentView:
    """An encoded example that is not packed yet, for a dry run; arguments as those of `view_tokens`."""
    return SegmentView(tokens=view_tokens(ids, weights, words=words_from(loaded), why=why))


def with_reasons(segments: Sequence[SegmentView], store: Store, notes: list[str]) -> list[SegmentView]:
    """The same segments with the reason of every token; what stands in the way is noted."""
    from packsvc.view.reasons import Reasons

    try:
        reasons = Reasons(store)
    except PacksvcError as error:
        notes.append(f"there are no reasons: {error}")
        return list(segments)
    out: list[SegmentView] = []
    for segment in segments:
        try:
            found = reasons.of(
                [token.id for token in segment.tokens],
                file=int(segment.file or 0),
                row=int(segment.row or 0),
                part=int(segment.part or 0),
            )
        except PacksvcError as error:
            notes.append(f"segment {segment.number} has no reasons: {error}")
            out.append(segment)
        else:
            tokens = [replace(token, why=why) for token, why in zip(segment.tokens, found, strict=True)]
            out.append(replace(segment, tokens=tokens))
    return out


def words_from(loaded: LoadedTokenizer) -> Words:
    """Texts of a loaded tokenizer's ids."""
    return Words(loaded.backend, definition=loaded.definition, control_tokens=loaded.control_tokens)


def words_of(store: Store, manifest: Manifest) -> tuple[Words | None, list[str]]:
    """The texts of the tokenizer that an output was made with; None, and why, when it is not at hand."""
    facts = manifest.tokenizer
    try:
        loaded = _load(json.dumps(manifest.config), _base(store), facts.revision)
    except (EncodeError, ConfigError) as error:
        return None, [f"ids stand for texts, since the tokenizer could not be read: {error}"]
    if loaded.facts.fingerprint != facts.fingerprint:
        return None, [
            f"ids stand for texts, since the tokenizer that {facts.id!r} names here is not the one that made them "
            f"(fingerprint {loaded.facts.fingerprint[:12]}, the manifest says {facts.fingerprint[:12]})"
        ]
    return words_from(loaded), []


@functools.lru_cache(maxsize=4)
def _load(config: str, base: str, revision: str | None) -> LoadedTokenizer:
    """Kept for the next pack: a large vocabulary takes a second to read."""
    return load_tokenizer(parse_job(json.loads(config), base=base, where="manifest.json"), revision=revision)


def _base(store: Store) -> str:
    """The folder that the job's relative paths start from; here, where there is no plan that says so."""
    try:
        base = json.loads(store.read(PLAN)).get("base")
    except (FileNotFoundError, ValueError, AttributeError):
        base = None
    return base if isinstance(base, str) else os.getcwd()


def _segment(columns: PackColumns, manifest: Manifest, number: int, words: Words | None) -> SegmentView:
    start, stop = int(columns.cu_seqlens[number]), int(columns.cu_seqlens[number + 1])
    file = int(columns.segment_file[number])
    weights = columns.loss_mask[0] if columns.loss_weight is None else columns.loss_weight[0]
    known = 0 <= file < len(manifest.inputs)
    return SegmentView(
        tokens=view_tokens(columns.input_ids[0, start:stop].tolist(), weights[start:stop].tolist(), words=words),
        number=number,
        start=start,
        path=manifest.inputs[file].path if known else f"input {file}",
        source=manifest.inputs[file].source if known else None,
        file=file,
        row=int(columns.segment_row[number]),
        part=int(columns.segment_part[number]),
    )
