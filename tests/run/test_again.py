"""Packing again: the same segments in new packs, and nothing else."""

import json

import pytest

from packsvc.errors import ConfigError, DamageError, FormatError, StateError
from packsvc.run import pack, repack
from packsvc.shards import Manifest, ShardReader
from packsvc.storage import Store
from tests.run.jobs import shard_bytes, small_job, write_rows


@pytest.fixture
def packed(tmp_path, qwen3_path):
    write_rows(tmp_path / "data" / "a.jsonl", 120)
    write_rows(tmp_path / "data" / "b.jsonl", 60, seed=1)
    sources = [{"path": "data/a.jsonl", "weight": 1.5}, {"path": "data/b.jsonl"}]
    job = small_job(tmp_path, qwen3_path, sources=sources, splits={"train": 0.8, "valid": 0.2})
    pack(job, workers=0)
    return tmp_path / "out"


def segments(out):
    """Split, origin, ids and mask of every segment, sorted."""
    store, manifest, found = Store(str(out)), Manifest.load(str(out)), []
    for entry in manifest.shards:
        with ShardReader(store, entry, plan_id=manifest.plan_id, seq_len=manifest.seq_len) as reader:
            packs = reader.read()
        for p in range(packs.num_packs):
            bounds = packs.cu_seqlens[packs.cu_offsets[p] : packs.cu_offsets[p + 1]]
            first = packs.segment_offsets[p]
            for j in range(packs.num_segments[p]):
                a, b = bounds[j], bounds[j + 1]
                origin = tuple(int(x[first + j]) for x in (packs.segment_file, packs.segment_row, packs.segment_part))
                ids, mask = packs.input_ids[p, a:b].tolist(), packs.loss_mask[p, a:b].tolist()
                found.append((entry.split, origin, ids, mask))
    return sorted(found)


@pytest.mark.parametrize(
    ("seq_len", "strategy", "align"), [(512, "ffd", 1), (300, "first_fit_random", 8), (256, "next_fit", 1)]
)
def test_ids_masks_origins_and_splits_stay_what_they_are(packed, tmp_path, seq_len, strategy, align):
    new = tmp_path / "new"
    old = Manifest.load(str(packed))
    manifest = repack(str(packed), str(new), seq_len=seq_len, strategy=strategy, align=align, workers=0)
    assert segments(new) == segments(packed)
    assert (manifest.seq_len, manifest.align) == (seq_len, align)
    for key in ("rows", "packed", "segments", "tokens", "loss_tokens", "encoded_tokens", "repeated_tokens"):
        assert manifest.totals[key] == old.totals[key]
    assert manifest.sources == old.sources
    assert manifest.plan_id != old.plan_id


def test_packing_again_twice_gives_the_same_bytes(packed, tmp_path):
    for name in ("one", "two"):
        repack(str(packed), str(tmp_path / name), seq_len=400, workers=0)
    assert shard_bytes(tmp_path / "one") == shard_bytes(tmp_path / "two")


def test_a_seq_len_below_the_longest_segment_is_refused(packed, tmp_path):
    longest = Manifest.load(str(packed)).totals["max_segment_tokens"]
    with pytest.raises(ConfigError, match=f"needs {longest} tokens"):
        repack(str(packed), str(tmp_path / "new"), seq_len=longest - 1, workers=0)
    assert not (tmp_path / "new").exists()
    repack(str(packed), str(tmp_path / "new"), seq_len=longest, workers=0)


def test_another_output_in_the_place_is_not_touched(packed, tmp_path):
    repack(str(packed), str(tmp_path / "new"), seq_len=512, workers=0)
    before = shard_bytes(tmp_path / "new")
    with pytest.raises(StateError, match="another output"):
        repack(str(packed), str(tmp_path / "new"), seq_len=640, workers=0)
    assert shard_bytes(tmp_path / "new") == before


def test_rows_that_were_overlong_are_named_since_they_cannot_come_back(tmp_path, qwen3_path):
    write_rows(tmp_path / "data" / "a.jsonl", 60)
    job = small_job(tmp_path, qwen3_path, seq_len=96, limits={"max_overlong_fraction": 0.9})
    first = pack(job, workers=0)
    overlong = first.totals["rejected_by_reason"]["overlong"]
    assert overlong > 3
    events = []
    manifest = repack(str(tmp_path / "out"), str(tmp_path / "new"), seq_len=512, workers=0, watch=events.append)
    assert any(f"{overlong} rows were rejected as overlong" in e.text for e in events)
    assert manifest.totals["rejected_by_reason"] == {"overlong": overlong}
    assert (tmp_path / "new" / manifest.rejects[0].path).exists()


def test_an_unfinished_output_cannot_be_packed_again(packed, tmp_path):
    (packed / "manifest.json").unlink()
    with pytest.raises(FormatError, match="unfinished"):
        repack(str(packed), str(tmp_path / "new"), seq_len=512, workers=0)


def test_a_damaged_shard_is_named_and_written_down(packed, tmp_path):
    entry = Manifest.load(str(packed)).shards[0]
    data = bytearray((packed / entry.path).read_bytes())
    data[200] ^= 4
    (packed / entry.path).write_bytes(data)
    with pytest.raises(DamageError, match=entry.path):
        repack(str(packed), str(tmp_path / "new"), seq_len=400, workers=0)
    (record,) = [json.loads(path.read_text()) for path in (tmp_path / "new" / "failures").iterdir()]
    assert entry.path in record["error"]
    assert f"{packed}, shard 0" in [split["path"] for split in record["splits"]]
