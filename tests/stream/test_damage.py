"""What is not as the manifest says is raised, by name, before any of it is handed out."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packsvc.errors import DamageError, FormatError, PacksvcError
from packsvc.storage import Store
from packsvc.stream import PackStream
from packsvc.stream.source import PackSource, RecentlyUsed
from tests.parquet import footer_start
from tests.stream.outputs import Written, write_manifest, write_output


@pytest.fixture
def out(tmp_path) -> Written:
    """Three shards of 4 packs."""
    return write_output(tmp_path / "o", [4, 4, 4], rows_per_group=2)


def shard_path(out: Written, shard: int) -> Path:
    return Path(out.path, out.manifest.shards[shard].path)


def read_until_error(out: Written, **options) -> tuple[list[int], PacksvcError]:
    """Packs handed out in manifest order, and what stopped it."""
    stream = PackStream(out.path, shuffle=False, **options)
    packs: list[int] = []
    try:
        for batch in stream:
            packs += batch.pack_indices
    except PacksvcError as error:
        assert stream.state_dict()["position"] == len(packs)
        return packs, error
    raise AssertionError("nothing was raised")


def rewrite(out: Written, shard: int, change: Callable[[dict], None]) -> None:
    """Change the columns of a shard and make manifest and names fit again, as a wrong writer would."""
    path = shard_path(out, shard)
    table = pq.read_table(path)
    columns = {name: table.column(name).to_pylist() for name in table.column_names}
    change(columns)
    changed = pa.table(columns, schema=table.schema)
    pq.write_table(changed, path, write_page_checksum=True)
    shards = list(out.manifest.shards)
    shards[shard] = replace(shards[shard], size_bytes=path.stat().st_size)
    write_manifest(out, shards=tuple(shards))


@pytest.mark.parametrize("threads", [0, 3])
def test_a_flipped_bit_is_raised_with_shard_and_pack(out: Written, threads: int):
    path = shard_path(out, 1)
    metadata = pq.ParquetFile(path).metadata
    column = metadata.row_group(1).column(0)
    assert column.path_in_schema == "input_ids.list.element"
    data = bytearray(path.read_bytes())
    data[column.data_page_offset + column.total_compressed_size - 5] ^= 8
    path.write_bytes(data)
    packs, error = read_until_error(out, threads=threads)
    assert isinstance(error, DamageError)
    assert packs == list(range(6))
    assert "pack 6 " in str(error)
    assert path.name in str(error)


@pytest.mark.parametrize("cut", [1, 100, 1000])
def test_a_truncated_shard_is_raised_before_any_of_its_packs(out: Written, cut: int):
    path = shard_path(out, 1)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - cut])
    packs, error = read_until_error(out)
    assert packs == [0, 1, 2, 3]
    assert f"{len(data) - cut} bytes, the manifest says {len(data)}" in str(error)
    assert path.name in str(error)


def test_a_missing_shard_is_raised_by_name(out: Written):
    shard_path(out, 2).unlink()
    packs, error = read_until_error(out)
    assert packs == list(range(8))
    assert shard_path(out, 2).name in str(error)


def test_everything_is_checked_at_opening_on_request(out: Written):
    shard_path(out, 2).unlink()
    with pytest.raises(DamageError, match=shard_path(out, 2).name):
        PackStream(out.path, check="all")


def test_a_shard_of_another_plan_in_its_place_is_refused(out: Written, tmp_path):
    other = write_output(tmp_path / "p", [4, 4, 4], rows_per_group=2, seed=9)
    shutil.copy(shard_path(other, 0), shard_path(out, 0))
    shards = list(out.manifest.shards)
    shards[0] = replace(shards[0], size_bytes=shard_path(out, 0).stat().st_size)
    write_manifest(out, shards=tuple(shards))
    packs, error = read_until_error(out)
    assert packs == []
    assert "packsvc.plan_id" in str(error)
    assert out.manifest.plan_id in str(error)


def test_a_shard_in_anothers_place_is_refused(out: Written):
    shutil.copy(shard_path(out, 0), shard_path(out, 1))
    shards = list(out.manifest.shards)
    shards[1] = replace(shards[1], size_bytes=shard_path(out, 1).stat().st_size)
    write_manifest(out, shards=tuple(shards))
    packs, error = read_until_error(out)
    assert packs == [0, 1, 2, 3]
    assert "packsvc.shard is 'train-000000-000' in the file and must be 'train-000001-000'" in str(error)


def test_counts_of_a_shard_must_add_up_to_the_manifests(out: Written):
    shards = list(out.manifest.shards)
    first, second = shards[0], shards[1]
    shards[0] = replace(first, num_loss_tokens=first.num_loss_tokens + 1)
    shards[1] = replace(second, num_loss_tokens=second.num_loss_tokens - 1)
    write_manifest(out, shards=tuple(shards))
    packs, error = read_until_error(out)
    assert packs == []
    assert "num_loss_tokens adds up to" in str(error)


def test_a_manifest_whose_totals_contradict_its_shards_is_refused_at_opening(out: Written):
    shards = list(out.manifest.shards)
    shards[0] = replace(shards[0], num_packs=3)
    write_manifest(out, shards=tuple(shards))
    with pytest.raises(FormatError, match="contradicts itself"):
        PackStream(out.path)


@pytest.mark.parametrize("path", ["../o/shards/x.parquet", "/etc/passwd", "shards/../../x", "s3://bucket/x"])
def test_paths_outside_the_output_are_refused(out: Written, path: str):
    manifest = json.loads(Path(out.path, "manifest.json").read_text())
    manifest["shards"][0]["path"] = path
    Path(out.path, "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(FormatError):
        PackStream(out.path)


def test_a_shard_listed_twice_is_refused(out: Written):
    write_manifest(out, shards=(*out.manifest.shards[:2], out.manifest.shards[1]))
    with pytest.raises(FormatError):
        PackStream(out.path)


def test_what_is_no_output_is_refused(tmp_path):
    with pytest.raises(FormatError, match="no such folder"):
        PackStream(tmp_path / "nowhere")
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "plan.json").write_text("{}")
    with pytest.raises(FormatError, match="unfinished"):
        PackStream(tmp_path / "unfinished")


def _mask(columns: dict) -> None:
    columns["loss_mask"][2][0] = not columns["loss_mask"][2][0]


def _boundary(columns: dict) -> None:
    columns["cu_seqlens"][2][1] = columns["cu_seqlens"][2][2]


def _first(columns: dict) -> None:
    columns["cu_seqlens"][2][0] = 1


def _last(columns: dict) -> None:
    columns["cu_seqlens"][2][-1] += 1


def _segments(columns: dict) -> None:
    columns["cu_seqlens"][2].insert(1, 1)


def _tail(columns: dict) -> None:
    row = next(i for i, n in enumerate(columns["num_tokens"]) if n < 24)
    columns["loss_mask"][row][-1] = True


def _moved(columns: dict) -> None:
    """A target moved onto the first token of the second segment: the count stays right."""
    mask, cu = columns["loss_mask"][2], columns["cu_seqlens"][2]
    mask[mask.index(True)], mask[cu[1]] = False, True


@pytest.mark.parametrize("change", [_mask, _boundary, _first, _last, _segments, _tail, _moved])
def test_packs_that_contradict_themselves_are_refused(out: Written, change: Callable[[dict], None]):
    """Right checksums do not make a right pack: a wrong writer made them."""
    rewrite(out, 0, change)
    packs, error = read_until_error(out, threads=0)
    assert isinstance(error, DamageError)
    assert shard_path(out, 0).name in str(error)
    assert len(packs) < 4


def test_a_harmless_rewrite_is_no_damage(out: Written):
    rewrite(out, 0, lambda columns: None)
    assert len(list(PackStream(out.path))) == 12


def test_a_shard_that_changed_while_it_was_read_is_noticed_when_opened_again(out: Written):
    source = PackSource(Store(out.path), out.manifest)
    source.counts(np.array([0, 3]))
    source.pages(np.array([0]))
    source.close()
    os.truncate(shard_path(out, 0), 100)
    with pytest.raises(DamageError, match="100 bytes"):
        source.pages(np.array([3]))


def test_the_cache_lets_go_of_the_oldest_and_keeps_the_newest():
    cache: RecentlyUsed[str] = RecentlyUsed(10)
    cache.put("a", "A", 6)
    cache.put("b", "B", 4)
    assert cache.get("a") == "A"
    cache.put("c", "C", 4)
    assert cache.get("b") is None
    assert cache.get("a") == "A"
    cache.put("d", "D", 100)
    assert [cache.get(key) for key in "acd"] == [None, None, "D"]


def test_more_shards_than_open_files(tmp_path, monkeypatch):
    monkeypatch.setattr("packsvc.stream.source.MAX_OPEN_SHARDS", 2)
    monkeypatch.setattr("packsvc.stream.source.CACHE_BYTES", 1)
    out = write_output(tmp_path / "o", [2] * 7)
    for threads in (0, 3):
        stream = PackStream(out.path, threads=threads)
        assert sorted(p for batch in stream for p in batch.pack_indices) == list(range(14))
        source = stream._maker._sources[0]
        assert sum(reader.is_open for reader in source._readers) <= 4


@pytest.mark.parametrize("check", ["touch", "all"])
def test_a_flipped_bit_in_the_name_of_the_weights_is_raised(tmp_path, check: str):
    """Without the column every target would weigh 1."""
    out = write_output(tmp_path / "o", [4, 4], weights=True)
    write_manifest(out, config={"loss_weights": True})
    assert next(iter(PackStream(out.path, check=check))).loss_weights is not None
    path = shard_path(out, 0)
    data = bytearray(path.read_bytes())
    data[data.index(b"\x0bloss_weight", footer_start(data)) + 1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamageError, match=r"train-000000-000.*no column loss_weight"):
        list(PackStream(out.path, check=check))


def test_a_pad_id_that_is_no_token_is_refused(out: Written):
    write_manifest(out, tokenizer=replace(out.manifest.tokenizer, pad_id=2**31))
    with pytest.raises(FormatError, match=r"tokenizer.pad_id must be an integer of at most 2147483647"):
        PackStream(out.path, align=8)
