"""The manifest: what it says, what it keeps, and what it refuses."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from packsvc.errors import FormatError
from packsvc.shards import PACK_KEYS, SOURCE_KEYS, TOTAL_KEYS, Manifest, ShardEntry
from packsvc.storage import Store

SHA = "0123456789abcdef" * 4


def counts(keys: tuple[str, ...], **known: Any) -> dict[str, Any]:
    start: dict[str, Any] = dict.fromkeys(keys, 0)
    for key, value in (("rejected_by_reason", {}), ("efficiency", 1.0)):
        if key in start:
            start[key] = value
    return {**start, **{key: value for key, value in known.items() if key in keys}}


def example() -> dict[str, Any]:
    """A manifest as the format shows it, with three shards of two splits."""
    shards = [
        ("train-000001-000", "train", 3),
        ("valid-000000-000", "valid", 1),
        ("train-000000-000", "train", 2),
    ]
    total = {"packs": 6, "segments": 42, "tokens": 6 * 4090, "loss_tokens": 5400}
    return {
        "format": 1,
        "name": "quickstart",
        "packsvc_version": "0.1.0",
        "plan_id": SHA,
        "seq_len": 4096,
        "align": 1,
        "seed": 0,
        "config": {"name": "quickstart"},
        "versions": {"transformers": "5.23.0"},
        "tokenizer": {
            "id": "./tokenizers/qwen3",
            "revision": None,
            "fingerprint": SHA,
            "files_sha256": {"tokenizer.json": SHA},
            "template_sha256": SHA,
            "vocab_size": 151669,
            "pad_id": 151643,
            "stop_ids": [151645],
            "backend": "fastokens 0.3.5",
        },
        "inputs": [
            {
                "path": "data/chat/a.jsonl.gz",
                "source": "chat",
                "size_bytes": 1,
                "etag": None,
                "mtime": 1.0,
                "num_rows": 530,
            }
        ],
        "shards": [
            {
                "path": f"shards/{shard}-{SHA[:12]}.parquet",
                "split": split,
                "size_bytes": 10,
                "sha256": SHA,
                "num_packs": packs,
                "num_segments": 7 * packs,
                "num_tokens": 4090 * packs,
                "num_loss_tokens": 900 * packs,
            }
            for shard, split, packs in shards
        ],
        "rejects": [{"path": "rejects/000000.parquet", "size_bytes": 1, "sha256": SHA, "num_rows": 3}],
        "totals": counts(TOTAL_KEYS, rows=530, rejected_by_reason={"overlong": 8}, **total),
        "splits": {
            "train": counts(PACK_KEYS, packs=5, segments=35, tokens=5 * 4090, loss_tokens=4500),
            "valid": counts(PACK_KEYS, packs=1, segments=7, tokens=4090, loss_tokens=900),
        },
        "sources": {"chat": counts(SOURCE_KEYS, rows=530)},
        "tables": {"packs": {"path": "packs.parquet", "size_bytes": 5, "sha256": SHA}},
    }


def changed(path: str, value: Any) -> dict[str, Any]:
    """The example with one key set, or removed where the value is "DROP"."""
    data = copy.deepcopy(example())
    *way, last = path.split(".")
    place: Any = data
    for step in way:
        place = place[int(step)] if step.isdigit() else place[step]
    if value == "DROP":
        del place[last]
    else:
        place[int(last) if last.isdigit() else last] = value
    return data


def test_a_manifest_is_read_and_written_back_the_same() -> None:
    assert Manifest.from_json(example()).to_json() == example()
    assert list(Manifest.from_json(example()).to_json()) == list(example()), "in the order of the contract"


def test_keys_that_this_version_does_not_know_are_kept() -> None:
    data = example()
    data["audit"] = {"findings": []}
    data["tokenizer"]["bos_id"] = 1
    for name in ("inputs", "shards", "rejects"):
        data[name][0]["more"] = [1, 2]
    data["tables"]["packs"]["num_rows"] = 6
    data["totals"]["new_count"] = 3
    data["sources"]["chat"]["new_count"] = 3
    manifest = Manifest.from_json(data)
    assert manifest.extra["audit"] == {"findings": []}
    assert manifest.shards[0].extra == {"more": [1, 2]}
    assert manifest.to_json() == data


def test_packs_are_counted_over_shards_in_manifest_order() -> None:
    manifest = Manifest.from_json(example())
    assert manifest.num_packs == 6
    assert manifest.pack_offsets.tolist() == [0, 3, 4, 6]
    assert [manifest.locate(pack) for pack in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1)]
    for pack in (-1, 6):
        with pytest.raises(IndexError, match=f"no pack {pack}; there are 6"):
            manifest.locate(pack)


def test_a_shard_without_packs_is_never_located() -> None:
    manifest = Manifest.from_json(changed("shards.1.num_packs", 0))
    assert [manifest.locate(pack)[0] for pack in range(5)] == [0, 0, 0, 2, 2]


def test_shards_of_a_split_keep_their_order() -> None:
    manifest = Manifest.from_json(example())
    assert [shard.num_packs for shard in manifest.shards_of("train")] == [3, 2]
    with pytest.raises(FormatError, match="no split 'test'; this output has train, valid"):
        manifest.shards_of("test")


def test_the_digest_binds_data_and_neither_dates_nor_names() -> None:
    base = Manifest.from_json(example()).digest
    for path, value in (("inputs.0.mtime", 2.0), ("name", "other"), ("shards.0.path", "shards/other.parquet")):
        assert Manifest.from_json(changed(path, value)).digest == base
    for path, value in (("plan_id", "x"), ("shards.0.sha256", "f" * 64), ("shards.0.num_packs", 4)):
        assert Manifest.from_json(changed(path, value)).digest != base
    data = example()
    data["shards"] = data["shards"][::-1]
    assert Manifest.from_json(data).digest != base, "readers count in the order of the shards"


def test_totals_that_do_not_follow_from_the_shards_are_listed() -> None:
    assert Manifest.from_json(example()).disagreements() == []
    for path in ("totals.packs", "totals.tokens", "splits.train.segments", "splits.valid.loss_tokens"):
        found = Manifest.from_json(changed(path, 999_999)).disagreements()
        assert len(found) == 1
        assert found[0].startswith(f"{path} is 999999, the shards add up to")
    assert "does not list" in Manifest.from_json(changed("splits.valid", "DROP")).disagreements()[0]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("seq_len", "4096", "seq_len must be an integer of at least 1, not '4096'"),
        ("seq_len", 0, "seq_len must be an integer of at least 1, not 0"),
        ("seq_len", True, "seq_len must be an integer"),
        ("plan_id", "DROP", "plan_id is missing"),
        ("shards", {}, "shards must be a list"),
        ("shards.1", 7, r"shards\[1\] must be an object, not 7"),
        ("shards.1.num_packs", -1, r"shards\[1\]\.num_packs must be an integer of at least 0, not -1"),
        ("shards.0.sha256", "abc", r"shards\[0\]\.sha256 must be 64 hex digits"),
        ("tokenizer.stop_ids", None, r"tokenizer\.stop_ids must be a list, not None"),
        ("totals.efficiency", "high", r"totals\.efficiency must be a number"),
        ("totals.packs", "DROP", r"totals\.packs is missing"),
        ("totals.rejected_by_reason", 3, r"totals\.rejected_by_reason must be an object"),
        ("splits.train.packs", 1.5, r"splits\.train\.packs must be an integer"),
        ("sources.chat.rows", "DROP", r"sources\.chat\.rows is missing"),
        ("inputs.0.mtime", "now", r"inputs\[0\]\.mtime must be a number"),
        ("tables.packs.path", 1, r"tables\.packs\.path must be a string"),
    ],
)
def test_a_malformed_manifest_is_refused_by_key(path: str, value: Any, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        Manifest.from_json(changed(path, value), where="out/manifest.json")


@pytest.mark.parametrize("version", [0, 2, 17])
def test_another_format_version_is_refused_with_both(version: int) -> None:
    with pytest.raises(FormatError, match=f"format {version}; this packsvc reads format 1"):
        Manifest.from_json(changed("format", version))


@pytest.mark.parametrize(
    "path",
    [
        "../other/shards/x.parquet",
        "shards/../../x.parquet",
        "/etc/passwd",
        "s3://bucket/x.parquet",
        "shards\\..\\x",
        "~/x",
        "",
        ".",
        "..",
        "shards//x.parquet",
        "shards/x.parquet/",
        "C:/x",
        "shards/\0",
    ],
)
@pytest.mark.parametrize("place", ["shards.0.path", "rejects.0.path", "tables.packs.path"])
def test_a_path_that_leaves_the_output_is_refused(place: str, path: str) -> None:
    with pytest.raises(FormatError, match="leaves the output"):
        Manifest.from_json(changed(place, path))


@pytest.mark.parametrize("value", [None, [], 3, "x"])
def test_json_that_is_no_object_is_refused(value: Any) -> None:
    with pytest.raises(FormatError, match="the whole must be an object"):
        Manifest.from_json(value)


def test_loading_reads_what_was_written(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps(example()))
    for out in (str(tmp_path), Store(str(tmp_path))):
        assert Manifest.load(out).to_json() == example()


def test_loading_tells_what_stands_there_instead(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no such folder"):
        Manifest.load(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(FormatError, match="not a packsvc output, the folder is empty"):
        Manifest.load(str(tmp_path / "empty"))
    (tmp_path / "file").write_text("x")
    with pytest.raises(FormatError, match="is a file"):
        Manifest.load(str(tmp_path / "file"))
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "data.parquet").write_text("x")
    with pytest.raises(FormatError, match=r"not a packsvc output, there is no manifest\.json"):
        Manifest.load(str(tmp_path / "foreign"))
    with pytest.raises(FormatError, match="no such folder"):
        Manifest.load("memory://packsvc-no-such-folder")


def test_i3_shards_without_a_manifest_are_an_unfinished_run(tmp_path: Path) -> None:
    """Half-written files and whole ones alike: nothing counts until the manifest names it."""
    (tmp_path / "plan.json").write_text("{}")
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / f"train-000000-000-{SHA[:12]}.parquet").write_bytes(b"PAR1")
    with pytest.raises(FormatError, match=r"unfinished.*run `packsvc pack` again to resume"):
        Manifest.load(str(tmp_path))


@pytest.mark.parametrize("text", ["", "{", "\xff", '{"format": 1'])
def test_a_manifest_that_is_no_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(FormatError, match=r"manifest\.json: is no JSON"):
        Manifest.load(str(tmp_path))


def test_records_are_frozen() -> None:
    manifest = Manifest.from_json(example())
    with pytest.raises(dataclasses.FrozenInstanceError):
        manifest.seed = 1  # type: ignore[misc]
    assert isinstance(manifest.shards[0], ShardEntry)
