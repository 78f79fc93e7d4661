"""The way through an output: whole files, counted, repeatable, refused where it must be."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from packsvc.errors import ConfigError, DamageError, FormatError
from packsvc.export import FORMATS, export_dataset
from packsvc.export import exporting as under_test
from packsvc.storage import Store
from tests.export.oracle import rows_of, streamed
from tests.stream.outputs import Written, write_manifest, write_output


def copied(written: Written, folder: Path) -> Written:
    """The same output elsewhere, to be damaged."""
    shutil.copytree(written.path, folder)
    return replace(written, path=str(folder))


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def two_splits(folder: Path) -> Written:
    """An output of a train and a valid split."""
    train = write_output(folder, [4, 2], seed=1)
    valid = write_output(folder, [3], seed=2, split="valid")
    # One plan, one manifest: the second's shards are written again under the first's plan.
    from packsvc.shards import ShardMeta, shard_file_name, shard_name, write_shard
    from tests.stream.outputs import joined

    name = shard_name("valid", 9, 0)
    data = write_shard(
        [joined(valid.packs)],
        meta=ShardMeta(plan_id=train.manifest.plan_id, seq_len=24, shard=name),
        compression="zstd:1",
        loss_weights=False,
    )
    sha256 = hashlib.sha256(data).hexdigest()
    Path(folder, shard_file_name(name, sha256)).write_bytes(data)
    entry = replace(valid.manifest.shards[0], path=shard_file_name(name, sha256), size_bytes=len(data), sha256=sha256)
    totals = dict(train.manifest.totals)
    for key in ("packs", "segments", "tokens", "loss_tokens"):
        totals[key] += valid.manifest.totals[key]
    manifest = replace(
        train.manifest,
        shards=(*train.manifest.shards, entry),
        splits={**train.manifest.splits, **valid.manifest.splits},
        totals=totals,
    )
    both = replace(train, manifest=manifest)
    write_manifest(both)
    return both


@pytest.mark.parametrize("to", FORMATS)
def test_totals_are_those_of_the_manifest_and_of_the_files(small: Written, tmp_path: Path, to: str):
    made = export_dataset(small.path, str(tmp_path / "d"), to=to)
    totals = small.manifest.totals
    assert made.totals.segments == totals["segments"]
    assert made.totals.loss_tokens == totals["loss_tokens"]
    assert made.totals.packs == 21
    assert made.totals.tokens == totals["tokens"]
    record = json.loads((tmp_path / "d" / "export.json").read_text())
    assert record == made.to_json()
    found = digests(tmp_path / "d")
    del found["export.json"]
    assert {file["path"]: file["sha256"] for file in record["files"]} == found
    assert len({file["shard"] for file in record["files"]} - {None}) == 3


@pytest.mark.parametrize("to", FORMATS)
def test_the_same_output_gives_the_same_bytes(small: Written, tmp_path: Path, to: str):
    export_dataset(small.path, str(tmp_path / "one"), to=to)
    export_dataset(small.path, str(tmp_path / "other"), to=to)
    assert digests(tmp_path / "one") == digests(tmp_path / "other")


def test_a_destination_that_holds_anything_is_refused(small: Written, tmp_path: Path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"not empty \(mine.txt"):
        export_dataset(small.path, str(tmp_path / "d"), to="trl")
    assert (tmp_path / "d" / "mine.txt").read_text() == "mine"
    with pytest.raises(ConfigError, match="is a file"):
        export_dataset(small.path, str(tmp_path / "d" / "mine.txt"), to="trl")
    with pytest.raises(ConfigError, match="not empty"):
        export_dataset(small.path, small.path, to="trl")
    (tmp_path / "link").symlink_to(small.path)
    before = digests(Path(small.path))
    for inside in (f"{small.path}/shards/x", f"{small.path}/x", str(tmp_path / "link" / "x")):
        with pytest.raises(ConfigError, match="lies inside the packed output"):
            export_dataset(small.path, inside, to="trl")
    assert digests(Path(small.path)) == before


@pytest.mark.parametrize("eos", [-1, 500])
def test_an_eos_outside_of_the_vocabulary_is_refused(small: Written, tmp_path: Path, eos: int):
    assert small.manifest.tokenizer.vocab_size == 500
    with pytest.raises(ConfigError, match=rf"--eos-id {eos}: the tokenizer has ids from 0 to 499"):
        export_dataset(small.path, str(tmp_path / "d"), to="megatron", pad_to_multiple=2, eos_id=eos)


def test_a_finished_export_is_never_written_over(small: Written, tmp_path: Path):
    export_dataset(small.path, str(tmp_path / "d"), to="trl")
    before = digests(tmp_path / "d")
    with pytest.raises(ConfigError, match="not empty"):
        export_dataset(small.path, str(tmp_path / "d"), to="trl")
    assert digests(tmp_path / "d") == before


def test_an_export_that_was_cut_short_says_so_and_goes_on(small: Written, tmp_path: Path, monkeypatch: Any):
    whole = tmp_path / "whole"
    export_dataset(small.path, str(whole), to="megatron")
    calls = []
    publish = Store.publish_file

    def fail_at_the_second(self: Store, name: str, path: str) -> None:
        calls.append(name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        publish(self, name, path)

    monkeypatch.setattr(Store, "publish_file", fail_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        export_dataset(small.path, str(tmp_path / "d"), to="megatron")
    monkeypatch.undo()
    assert {path.name for path in (tmp_path / "d").iterdir()} == {"unfinished.json", calls[0]}
    with pytest.raises(ConfigError, match="another unfinished export"):
        export_dataset(small.path, str(tmp_path / "d"), to="trl")
    export_dataset(small.path, str(tmp_path / "d"), to="megatron")
    assert digests(tmp_path / "d") == digests(whole)


def test_unfinished_and_foreign_outputs_are_refused(tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "plan.json").write_text("{}")
    with pytest.raises(FormatError, match="unfinished"):
        export_dataset(str(tmp_path / "run"), str(tmp_path / "d"), to="trl")
    with pytest.raises(FormatError, match="no such folder"):
        export_dataset(str(tmp_path / "none"), str(tmp_path / "d"), to="trl")
    assert not (tmp_path / "d").exists()


def test_a_flipped_bit_stops_the_export(small: Written, tmp_path: Path):
    bad = copied(small, tmp_path / "bad")
    shard = Path(bad.path, bad.manifest.shards[1].path)
    data = bytearray(shard.read_bytes())
    data[200] ^= 4  # in the first page
    shard.write_bytes(data)
    with pytest.raises(DamageError, match=shard.name):
        export_dataset(bad.path, str(tmp_path / "d"), to="trl")
    assert not (tmp_path / "d" / "export.json").exists()
    assert (tmp_path / "d" / "unfinished.json").exists()


def test_a_missing_shard_stops_the_export(small: Written, tmp_path: Path):
    bad = copied(small, tmp_path / "bad")
    Path(bad.path, bad.manifest.shards[2].path).unlink()
    with pytest.raises(DamageError, match="gone"):
        export_dataset(bad.path, str(tmp_path / "d"), to="olmo")


def test_counts_that_differ_from_the_manifest_stop_the_export(small: Written, tmp_path: Path):
    bad = copied(small, tmp_path / "bad")
    shards = list(small.manifest.shards)
    shards[0] = replace(shards[0], num_loss_tokens=shards[0].num_loss_tokens + 1)
    more = {"loss_tokens": small.manifest.totals["loss_tokens"] + 1}
    splits = {"train": small.manifest.splits["train"] | more}
    write_manifest(bad, shards=tuple(shards), totals=small.manifest.totals | more, splits=splits)
    with pytest.raises(DamageError, match="the manifest says"):
        export_dataset(bad.path, str(tmp_path / "d"), to="trl")
    assert not (tmp_path / "d" / "export.json").exists()


def test_a_manifest_that_contradicts_itself_is_refused(small: Written, tmp_path: Path):
    bad = copied(small, tmp_path / "bad")
    write_manifest(bad, totals=small.manifest.totals | {"tokens": 1})
    with pytest.raises(FormatError, match="contradicts itself"):
        export_dataset(bad.path, str(tmp_path / "d"), to="trl")


@pytest.mark.parametrize(
    ("field", "change", "found"),
    [
        ("loss_mask", lambda a: a.__setitem__((0, 0), True), "a segment's first token has loss|disagree"),
        ("loss_mask", lambda a: a.__setitem__((0, slice(None)), False), "num_loss_tokens disagree"),
        ("cu_seqlens", lambda a: a.__setitem__(1, 0), "does not rise"),
        ("cu_seqlens", lambda a: a.__setitem__(0, 1), "does not span"),
        ("num_tokens", lambda a: a.__setitem__(0, a[0] - 1), "disagree"),
    ],
)
def test_a_pack_that_contradicts_itself_is_refused(small: Written, field: str, change: Any, found: str):
    from packsvc.export.segments import take_apart

    pack = small.packs[0]
    arrays = {name: getattr(pack, name).copy() for name in ("loss_mask", "cu_seqlens", "num_tokens")}
    take_apart(replace(pack, **arrays), where="shard", first_pack=7)
    change(arrays[field])
    with pytest.raises(DamageError, match=rf"shard, pack 7: .*({found})"):
        take_apart(replace(pack, **arrays), where="shard", first_pack=7)


def test_splits_have_folders_of_their_own_and_one_alone_has_none(tmp_path: Path):
    both = two_splits(tmp_path / "out")
    made = export_dataset(both.path, str(tmp_path / "all"), to="megatron")
    assert set(made.splits) == {"train", "valid"}
    assert made.totals.packs == 9
    assert sorted(p.name for p in (tmp_path / "all").iterdir()) == ["export.json", "train", "valid"]
    assert [p.name for p in sorted((tmp_path / "all" / "valid").iterdir())] == [
        "packed_metadata.json",
        "valid-00000-of-00001.idx.parquet",
    ]
    export_dataset(both.path, str(tmp_path / "one"), to="examples", split="valid")
    assert len(rows_of(tmp_path / "one")) == sum(map(len, streamed(both.path, "valid")))
    with pytest.raises(FormatError, match="no split 'test'"):
        export_dataset(both.path, str(tmp_path / "none"), to="trl", split="test")


def test_an_unknown_format_names_those_there_are(small: Written, tmp_path: Path):
    with pytest.raises(ConfigError, match="trl, megatron, torchtune, olmo, examples"):
        export_dataset(small.path, str(tmp_path / "d"), to="nemo")


def test_memory_holds_a_row_group_and_not_a_shard(small: Written, tmp_path: Path, monkeypatch: Any):
    sizes = []
    taken = under_test.take_apart

    def watching(packs: Any, **rest: Any) -> Any:
        sizes.append(packs.num_packs)
        return taken(packs, **rest)

    monkeypatch.setattr(under_test, "take_apart", watching)
    export_dataset(small.path, str(tmp_path / "d"), to="trl")
    assert max(sizes) == 4
    assert sum(sizes) == 21


def test_an_export_to_memory_or_a_bucket_is_the_same(small: Written, tmp_path: Path):
    """Any fsspec URL."""
    import fsspec

    export_dataset(small.path, str(tmp_path / "d"), to="examples")
    export_dataset(small.path, "memory://exports/here", to="examples")
    fs = fsspec.filesystem("memory")
    remote = {path.split("/here/")[1]: fs.cat_file(path) for path in fs.find("/exports/here")}
    assert remote == {path.name: path.read_bytes() for path in (tmp_path / "d").iterdir()}
    fs.rm("/exports", recursive=True)
