"""Each format read back by its own rules: the trained pairs are those of our reader, one by one."""

from __future__ import annotations

import csv
import gzip
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packsvc.errors import ConfigError, FormatError
from packsvc.export import FORMATS, export_dataset
from packsvc.plan import place
from tests.export.oracle import Trained, from_labels, rows_of, stored, streamed
from tests.stream.outputs import Written, encoded, write_manifest, write_packs

EOS = 2


def trl_packs(folder: Path) -> list[list[Trained]]:
    packs = []
    for row in rows_of(folder):
        assert len(row["input_ids"]) == len(row["labels"]) == sum(row["seq_lengths"])
        bounds = np.cumsum([0, *row["seq_lengths"]]).tolist()
        packs.append([from_labels(row["input_ids"][a:b], row["labels"][a:b]) for a, b in pairwise(bounds)])
    return packs


def torchtune_packs(folder: Path) -> list[list[Trained]]:
    """The recipe shifts the labels of the whole row by one: what a row teaches is read off after that."""
    packs = []
    for row in rows_of(folder):
        tokens, labels = row["tokens"], row["labels"]
        shifted = [*labels[1:], -100]
        segments, start = [], 0
        for length in row["seq_lens"]:
            stop = start + length
            assert row["input_pos"][start:stop] == list(range(length))
            pairs = tuple((j - start, tokens[j], shifted[j]) for j in range(start, stop) if shifted[j] != -100)
            segments.append(Trained(tuple(tokens[start:stop]), pairs))
            start = stop
        assert start == len(tokens)
        packs.append(segments)
    return packs


def megatron_packs(folder: Path, *, eos: int | None = None) -> list[list[Trained]]:
    """All but the last token of a segment go in, all but the first come out, the mask is cut as the inputs are.

    With `eos` padding is cut off the way the loader does it, by value.
    """
    packs = []
    for row in rows_of(folder, "*.idx.parquet"):
        ids, mask = row["input_ids"], row["loss_mask"]
        assert len(ids) == len(mask)
        segments = []
        for a, b in pairwise([*row["seq_start_id"], len(ids)]):
            inputs, labels, on = ids[a : b - 1], ids[a + 1 : b], mask[a : b - 1]
            assert mask[b - 1] == 0
            pairs = tuple((j, inputs[j], labels[j]) for j in range(len(inputs)) if on[j])
            whole = ids[a:b]
            if eos is not None:
                whole = whole[: max(i for i, token in enumerate(whole) if token != eos) + 1]
            segments.append(Trained(tuple(whole), pairs))
        packs.append(segments)
    return packs


def olmo_documents(folder: Path, dtype: str) -> list[Trained]:
    documents = []
    for path in sorted(folder.glob("token_ids_part_*.npy")):
        ids = np.memmap(path, mode="r", dtype=dtype).tolist()
        mask = np.memmap(str(path).replace("token_ids", "labels_mask"), mode="r", dtype=np.bool_).tolist()
        assert len(ids) == len(mask)
        covered = 0
        with gzip.open(str(path).replace(".npy", ".csv.gz"), "rt") as lines:
            for start, stop, *_ in csv.reader(lines):
                a, b = int(start), int(stop)
                assert a == covered
                covered = b
                labels = [i if on else -100 for i, on in zip(ids[a:b], mask[a:b], strict=True)]
                documents.append(from_labels(ids[a:b], labels))
        assert covered == len(ids)
    return documents


def example_rows(folder: Path) -> list[Trained]:
    return [from_labels(row["input_ids"], row["labels"]) for row in rows_of(folder)]


def flat(packs: list[list[Trained]]) -> list[Trained]:
    return [segment for pack in packs for segment in pack]


def without_tails(packs: list[list[Trained]]) -> list[list[Trained]]:
    return [[segment for segment in pack if segment.pairs] for pack in packs]


def test_the_oracle_is_what_one_would_write_by_hand(small: Written):
    assert from_labels([7, 8, 9], [-100, -100, 9]) == Trained((7, 8, 9), ((1, 8, 9),))
    assert stored(small) == streamed(small.path)
    assert sum(len(s.pairs) for s in flat(stored(small))) == small.manifest.totals["loss_tokens"]


def test_trl_rows_teach_what_our_reader_teaches(small: Written, tmp_path: Path):
    export_dataset(small.path, str(tmp_path / "d"), to="trl")
    assert trl_packs(tmp_path / "d") == stored(small)


def test_torchtune_rows_teach_what_our_reader_teaches(small: Written, tmp_path: Path):
    export_dataset(small.path, str(tmp_path / "d"), to="torchtune")
    packs = torchtune_packs(tmp_path / "d")
    assert without_tails(packs) == stored(small)
    assert {len(row["tokens"]) for row in rows_of(tmp_path / "d")} == {small.manifest.seq_len}


def test_megatron_rows_teach_what_our_reader_teaches(small: Written, tmp_path: Path):
    export_dataset(small.path, str(tmp_path / "d"), to="megatron")
    assert megatron_packs(tmp_path / "d") == stored(small)


@pytest.mark.parametrize("multiple", [2, 4])
def test_megatron_segments_are_padded_to_a_multiple_and_one(aligned: Written, tmp_path: Path, multiple: int):
    made = export_dataset(aligned.path, str(tmp_path / "d"), to="megatron", pad_to_multiple=multiple, eos_id=EOS)
    assert megatron_packs(tmp_path / "d", eos=EOS) == stored(aligned)
    for row in rows_of(tmp_path / "d"):
        lengths = np.diff([*row["seq_start_id"], len(row["input_ids"])])
        assert set((lengths - 1) % multiple) == {0}
        assert sum(lengths - 1) <= aligned.manifest.seq_len
    assert any("cu_seqlens_unpadded" in note for note in made.notes)


def test_megatron_types_and_metadata_are_those_of_the_loader(small: Written, tmp_path: Path):
    export_dataset(small.path, str(tmp_path / "d"), to="megatron")
    files = sorted((tmp_path / "d").glob("*.parquet"))
    assert len(files) == 3
    assert all(file.name.endswith(".idx.parquet") for file in files)
    types = {field.name: str(field.type.value_type) for field in pq.read_schema(files[0])}
    assert types == {"input_ids": "int32", "seq_start_id": "int32", "loss_mask": "int8"}
    [facts] = json.loads((tmp_path / "d" / "packed_metadata.json").read_text())
    lengths = [[len(s.ids) - 1 for s in pack] for pack in stored(small)]
    assert facts == {
        "dataset_max_seqlen": max(map(max, lengths)),
        "max_samples_per_bin": max(map(len, lengths)),
        "packing_factor": round(sum(map(len, lengths)) / len(lengths), 2),
        "packing_efficiency": round(100 * sum(map(sum, lengths)) / len(lengths) / small.manifest.seq_len, 2),
        "pack_size": small.manifest.seq_len,
        "min_packed_seqlen": min(map(sum, lengths)),
    }


def test_megatron_tells_how_many_targets_its_loader_will_drop(small: Written, tmp_path: Path):
    """Its loader takes the loss from every position whose input token is its EOS."""
    pairs = [pair for segment in flat(stored(small)) for pair in segment.pairs]
    token = max({p[1] for p in pairs}, key=[p[1] for p in pairs].count)
    count = sum(p[1] == token for p in pairs)
    made = export_dataset(small.path, str(tmp_path / "d"), to="megatron", eos_id=token)
    assert any(note.startswith(f"{count:,} targets stand right after token {token}:") for note in made.notes)


def test_olmo_arrays_teach_what_our_reader_teaches(small: Written, tmp_path: Path):
    made = export_dataset(small.path, str(tmp_path / "d"), to="olmo")
    assert olmo_documents(tmp_path / "d", "uint16") == flat(stored(small))
    assert "dtype=uint16" in made.notes[0]


def test_examples_teach_what_our_reader_teaches(small: Written, tmp_path: Path):
    export_dataset(small.path, str(tmp_path / "d"), to="examples")
    rows = rows_of(tmp_path / "d")
    assert example_rows(tmp_path / "d") == flat(stored(small))
    assert set(rows[0]) == {"input_ids", "labels", "attention_mask"}
    assert all(row["attention_mask"] == [1] * len(row["input_ids"]) for row in rows)


@settings(max_examples=8)
@given(
    lengths=st.lists(st.integers(2, 16), min_size=1, max_size=12),
    seed=st.integers(0, 99),
    trained=st.sampled_from([0.0, 0.5, 1.0]),
    align=st.sampled_from([1, 4]),
)
def test_every_format_teaches_the_same_pairs(tmp_path_factory, lengths, seed, trained, align):
    """Any lengths, full packs and packs of one segment, all or only the last token trained."""
    folder = tmp_path_factory.mktemp("any")
    placement = place(lengths, 16, align=align, seed=seed)
    batch = encoded(lengths, seed=seed, trained=trained)
    shards = [placement.num_packs] if placement.num_packs < 3 else [1, placement.num_packs - 1]
    out = write_packs(folder / "out", batch, placement, shards, seq_len=16, align=align, rows_per_group=2)
    wanted = stored(out)
    for to in FORMATS:
        export_dataset(out.path, str(folder / to), to=to)
    assert trl_packs(folder / "trl") == wanted
    assert without_tails(torchtune_packs(folder / "torchtune")) == wanted
    assert megatron_packs(folder / "megatron") == wanted
    assert olmo_documents(folder / "olmo", "uint16") == flat(wanted)
    assert example_rows(folder / "examples") == flat(wanted)
    if align > 1:
        export_dataset(out.path, str(folder / "cp"), to="megatron", pad_to_multiple=align, eos_id=EOS)
        assert megatron_packs(folder / "cp", eos=EOS) == wanted


# --- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", sorted(set(FORMATS) - {"examples"}))
def test_weights_that_a_format_cannot_say_are_refused_before_anything_is_written(weighted: Written, tmp_path, to):
    with pytest.raises(FormatError, match=r"pack \d+: targets have loss weights other than 1.*--to examples"):
        export_dataset(weighted.path, str(tmp_path / "d"), to=to)
    assert not (tmp_path / "d").exists()


def test_examples_carry_weights(weighted: Written, tmp_path: Path):
    made = export_dataset(weighted.path, str(tmp_path / "d"), to="examples")
    found = [weight for row in rows_of(tmp_path / "d") for weight in row["loss_weight"]]
    wanted = [w for p in weighted.packs for w in p.loss_weight[0, : int(p.num_tokens[0])].tolist()]
    assert found == wanted
    assert 0.25 in found
    assert any("loss_weight" in note for note in made.notes)


def test_weights_of_one_are_no_reason_to_refuse(tmp_path: Path):
    batch = encoded([5, 6, 7], weights=True)
    batch.loss_weight[:] = batch.loss_mask
    out = write_packs(tmp_path / "out", batch, place([5, 6, 7], 12), [2], seq_len=12)
    export_dataset(out.path, str(tmp_path / "d"), to="trl")
    assert trl_packs(tmp_path / "d") == stored(out)


# --- arguments of megatron -------------------------------------------------------------------------------------------


def test_p23_padding_that_the_output_did_not_reserve_is_refused_with_what_to_do(small: Written, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"repack OUT NEW --seq-len 24 --align 4"):
        export_dataset(small.path, str(tmp_path / "d"), to="megatron", pad_to_multiple=4, eos_id=EOS)
    with pytest.raises(ConfigError, match="--eos-id"):
        export_dataset(small.path, str(tmp_path / "d"), to="megatron", pad_to_multiple=4)


@pytest.mark.parametrize("options", [{"pad_to_multiple": 2}, {"eos_id": 3}])
def test_options_of_megatron_are_refused_elsewhere(small: Written, tmp_path: Path, options: dict[str, Any]):
    with pytest.raises(ConfigError, match="are for --to megatron"):
        export_dataset(small.path, str(tmp_path / "d"), to="trl", **options)


def test_t12_ids_over_65535_take_wider_integers(tmp_path: Path):
    """They never wrap."""
    batch = encoded([5, 9])
    batch.input_ids[:] += 70_000
    out = write_packs(tmp_path / "out", batch, place([5, 9], 16), [1], seq_len=16)
    write_manifest(out, tokenizer=replace(out.manifest.tokenizer, vocab_size=128_256))
    export_dataset(out.path, str(tmp_path / "d"), to="olmo")
    assert olmo_documents(tmp_path / "d", "uint32") == flat(stored(out))


def test_several_shards_and_packs_were_seen(small: Written):
    """The other tests would pass on nothing."""
    assert len(stored(small)) == 21
    assert len(small.manifest.shards) == 3


@pytest.mark.parametrize("to", ["megatron", "olmo", "trl", "examples"])
def test_p19_boundaries_come_from_rows_and_never_from_token_values(tmp_path: Path, to: str):
    """EOS in the middle of a chat, as where it ends every turn, and none at its end."""
    batch = encoded([9, 6, 12, 5])
    batch.input_ids[[2, 5, 11, 17, 18, 25]] = EOS
    out = write_packs(tmp_path / "out", batch, place([9, 6, 12, 5], 16), [2], seq_len=16)
    export_dataset(out.path, str(tmp_path / "d"), to=to)
    read = {"megatron": megatron_packs, "trl": trl_packs, "examples": example_rows}
    found: Any = olmo_documents(tmp_path / "d", "uint16") if to == "olmo" else read[to](tmp_path / "d")
    assert found == (stored(out) if to in ("megatron", "trl") else flat(stored(out)))


@pytest.mark.parametrize("to", FORMATS)
def test_m25_no_example_teaches_its_first_token(small: Written, tmp_path: Path, to: str):
    """Whatever packs or joins the rows later: nothing predicts across a boundary."""
    export_dataset(small.path, str(tmp_path / "d"), to=to)
    readers: dict[str, Any] = {
        "trl": trl_packs, "torchtune": torchtune_packs, "megatron": megatron_packs,
        "olmo": lambda folder: [olmo_documents(folder, "uint16")], "examples": lambda folder: [example_rows(folder)],
    }  # fmt: skip
    segments = flat(readers[to](tmp_path / "d"))
    assert sum(len(s.pairs) for s in segments) == small.manifest.totals["loss_tokens"]
    assert all(0 <= j < len(s.ids) - 1 for s in segments for j, _, _ in s.pairs)


def test_p18_p15_a_full_pack_has_no_empty_segment_and_a_tail_is_one(small: Written, tmp_path: Path):
    export_dataset(small.path, str(tmp_path / "t"), to="torchtune")
    export_dataset(small.path, str(tmp_path / "m"), to="megatron")
    full = 0
    for row, pack in zip(rows_of(tmp_path / "t"), small.packs, strict=True):
        assert min(row["seq_lens"]) > 0
        assert sum(row["seq_lens"]) == small.manifest.seq_len
        full += len(row["seq_lens"]) == int(pack.num_segments[0])
    assert 0 < full < len(small.packs)
    assert all(row["seq_start_id"][-1] < len(row["input_ids"]) for row in rows_of(tmp_path / "m"))
