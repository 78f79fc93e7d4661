"""Every check seen failing on damage made on purpose, where no hash would tell."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packsvc.validation import Report, validate
from tests.parquet import footer_start, zigzag
from tests.validation.damage import edit_manifest, edit_named, edit_plan, edit_rows, edit_table, manifest_of
from tests.validation.outputs import PACKS_PER_ROW_GROUP, VOCAB, make_output


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return make_output(tmp_path, seed=1, loss_weights=True, packing={"align": 4, "max_segments": 3})


def only(report: Report, *checks: str) -> list[str]:
    """The messages, when exactly these checks failed."""
    assert {f.check for f in report.failures} == set(checks), [str(f) for f in report.failures]
    assert not report.ok
    return [f.message for f in report.failures]


def tailed(rows: list[dict[str, Any]]) -> int:
    """A pack with a tail of at least two tokens."""
    return next(i for i, r in enumerate(rows) if r["num_tokens"] <= len(r["input_ids"]) - 2)


def wide(rows: list[dict[str, Any]]) -> int:
    """A pack with at least two segments, the second of at least three tokens."""
    return next(
        i for i, r in enumerate(rows) if r["num_segments"] >= 2 and r["cu_seqlens"][2] - r["cu_seqlens"][1] >= 3
    )


def test_a_right_output_passes_and_every_check_looked_at_something(out: Path) -> None:
    report = validate(out)
    assert report.ok, [str(f) for f in report.failures]
    assert report.num_failures == 0
    assert not report.notes
    assert all(check.checked > 0 for check in report.checks)
    assert len(report.checks) == 13


def test_a_finding_names_shard_row_group_pack_and_segment(out: Path) -> None:
    place: list[int] = []

    def change(rows: list[dict[str, Any]]) -> None:
        pack = max(i for i, r in enumerate(rows) if r["num_segments"] >= 2)
        place.append(pack)
        rows[pack]["input_ids"][rows[pack]["cu_seqlens"][1]] = VOCAB

    path = edit_rows(out, 1, change)
    failure = validate(out).failures[0]
    first = manifest_of(out)["shards"][0]["num_packs"]
    assert (failure.check, failure.shard, failure.segment) == ("geometry", path, 1)
    assert failure.pack == first + place[0]
    assert failure.row_group == place[0] // PACKS_PER_ROW_GROUP
    assert str(VOCAB) in failure.message


def boundary_off_by_one(rows: list[dict[str, Any]]) -> None:
    rows[wide(rows)]["cu_seqlens"][1] += 1


def first_boundary(rows: list[dict[str, Any]]) -> None:
    rows[0]["cu_seqlens"][0] = 1


def last_boundary(rows: list[dict[str, Any]]) -> None:
    rows[0]["cu_seqlens"][-1] -= 1


def equal_boundaries(rows: list[dict[str, Any]]) -> None:
    row = rows[wide(rows)]
    row["cu_seqlens"][2] = row["cu_seqlens"][1]


def tail_twice(rows: list[dict[str, Any]]) -> None:
    row = rows[tailed(rows)]
    row["cu_seqlens"].insert(-1, row["cu_seqlens"][-1] - 1)


def tail_merged(rows: list[dict[str, Any]]) -> None:
    row = rows[tailed(rows)]
    del row["cu_seqlens"][-2]


def positions_not_reset(rows: list[dict[str, Any]]) -> None:
    rows[wide(rows)]["position_ids"] = list(range(len(rows[0]["position_ids"])))


def one_position(rows: list[dict[str, Any]]) -> None:
    rows[0]["position_ids"][3] += 1


def id_beyond_the_vocabulary(rows: list[dict[str, Any]]) -> None:
    rows[0]["input_ids"][0] = VOCAB


def negative_id(rows: list[dict[str, Any]]) -> None:
    rows[0]["input_ids"][0] = -1


def tail_without_pads(rows: list[dict[str, Any]]) -> None:
    rows[tailed(rows)]["input_ids"][-1] = 8


def short_list(rows: list[dict[str, Any]]) -> None:
    for name in ("input_ids", "position_ids", "loss_mask", "loss_weight"):
        rows[0][name].pop()


def one_origin_short(rows: list[dict[str, Any]]) -> None:
    rows[0]["segment_row"].pop()


def wrong_num_segments(rows: list[dict[str, Any]]) -> None:
    rows[0]["num_segments"] += 1


def wrong_num_tokens(rows: list[dict[str, Any]]) -> None:
    rows[0]["num_tokens"] -= 1


def wrong_squares(rows: list[dict[str, Any]]) -> None:
    rows[0]["sum_squared_lengths"] += 1


GEOMETRY = [
    (boundary_off_by_one, "position_ids"),
    (first_boundary, "start at 0"),
    (last_boundary, "end at seq_len"),
    (equal_boundaries, "strictly increasing"),
    (tail_twice, "have an origin"),
    (tail_merged, "position_ids"),
    (positions_not_reset, "position_ids"),
    (one_position, "position_ids"),
    (id_beyond_the_vocabulary, "outside the vocabulary"),
    (negative_id, "outside the vocabulary"),
    (tail_without_pads, "in the tail"),
    (short_list, "seq_len"),
    (one_origin_short, "different lengths"),
    (wrong_num_segments, "num_segments"),
    (wrong_num_tokens, "num_tokens"),
    (wrong_squares, "sum_squared_lengths"),
]


@pytest.mark.parametrize(("damage", "words"), GEOMETRY, ids=[d.__name__ for d, _ in GEOMETRY])
def test_geometry_finds(out: Path, damage: Callable[[Any], None], words: str) -> None:
    path = edit_rows(out, 0, damage)
    found = [f for f in validate(out).failures if f.check == "geometry" and words in f.message]
    assert found
    assert all(f.shard == path and f.row_group is not None and f.pack is not None for f in found)


def loss_on_a_start(rows: list[dict[str, Any]]) -> None:
    row = rows[wide(rows)]
    row["loss_mask"][row["cu_seqlens"][1]] = True
    row["loss_weight"][row["cu_seqlens"][1]] = 1.0
    row["num_loss_tokens"] += 1


def loss_on_padding(rows: list[dict[str, Any]]) -> None:
    row = rows[tailed(rows)]
    row["loss_mask"][-1], row["loss_weight"][-1] = True, 1.0
    row["num_loss_tokens"] += 1


def segment_without_target(rows: list[dict[str, Any]]) -> None:
    row = rows[wide(rows)]
    for token in range(row["cu_seqlens"][1], row["cu_seqlens"][2]):
        row["num_loss_tokens"] -= row["loss_mask"][token]
        row["loss_mask"][token], row["loss_weight"][token] = False, 0.0


def wrong_num_loss_tokens(rows: list[dict[str, Any]]) -> None:
    rows[0]["num_loss_tokens"] += 1


def loss_on_a_prompt_token(rows: list[dict[str, Any]]) -> None:
    row = rows[0]
    row["loss_mask"][row["loss_mask"].index(False, 1)] = True


MASK = [
    (loss_on_a_start, "first token"),
    (loss_on_padding, "padding"),
    (segment_without_target, "without a trained token"),
    (wrong_num_loss_tokens, "num_loss_tokens"),
    (loss_on_a_prompt_token, "num_loss_tokens"),
]


@pytest.mark.parametrize(("damage", "words"), MASK, ids=[d.__name__ for d, _ in MASK])
def test_mask_finds(out: Path, damage: Callable[[Any], None], words: str) -> None:
    edit_rows(out, 0, damage)
    assert [f for f in validate(out).failures if f.check == "mask" and words in f.message]


@pytest.mark.parametrize("value", [0.0, -0.5, 1.5, float("nan"), float("inf")])
def test_weights_on_target_lie_above_0_and_at_most_at_1(out: Path, value: float) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        rows[0]["loss_weight"][rows[0]["loss_mask"].index(True)] = value

    edit_rows(out, 0, change)
    only(validate(out), "weights")


@pytest.mark.parametrize("value", [0.5, -0.0001, float("nan")])
def test_weights_off_target_are_0(out: Path, value: float) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        rows[0]["loss_weight"][0] = value

    edit_rows(out, 0, change)
    only(validate(out), "weights")


def test_a_weight_column_that_the_job_did_not_ask_for_is_found(tmp_path: Path) -> None:
    out = make_output(tmp_path)
    edit_table(out, 0, lambda t: t.append_column("loss_weight", t["position_ids"].cast(pa.list_(pa.float32()))))
    assert "loss_weights is false" in only(validate(out), "weights")[0]


def test_a_weight_column_that_is_missing_is_found(out: Path) -> None:
    edit_table(out, 0, lambda t: t.drop_columns(["loss_weight"]))
    assert "no column loss_weight" in only(validate(out), "schema")[0]


def test_columns_of_another_type_or_name_are_found(tmp_path: Path) -> None:
    for n, (change, words) in enumerate(
        [
            (lambda t: t.set_column(0, "input_ids", t["input_ids"].cast(pa.list_(pa.int64()))), "must be list"),
            (lambda t: t.rename_columns({"cu_seqlens": "cu"}), "no column cu_seqlens"),
            (lambda t: t.append_column("attention_mask", t["loss_mask"]), "not one of format 1"),
        ]
    ):
        out = make_output(tmp_path / str(n))
        edit_table(out, 0, change)
        assert words in " ".join(only(validate(out), "schema"))


def test_nulls_are_found_where_they_stand(out: Path) -> None:
    def change(table: pa.Table) -> pa.Table:
        rows = table.to_pylist()
        rows[0]["loss_mask"] = None
        rows[1]["input_ids"][2] = None
        fields = [
            pa.field(f.name, pa.list_(f.type.value_type) if pa.types.is_list(f.type) else f.type) for f in table.schema
        ]
        return pa.Table.from_pylist(rows, schema=pa.schema(fields))

    edit_table(out, 0, change)
    failures = [f for f in validate(out).failures if f.check == "schema"]
    assert [(f.pack, f.message) for f in failures] == [(1, "input_ids holds nulls"), (0, "loss_mask is null")]


@pytest.mark.parametrize("key", ["packsvc.format", "packsvc.plan_id", "packsvc.seq_len", "packsvc.shard"])
def test_file_metadata_of_another_shard_is_found(out: Path, key: str) -> None:
    edit_table(out, 0, lambda t: t, metadata={key.encode(): b"other"})
    assert key in only(validate(out), "schema")[0]


def test_a_rewritten_shard_without_damage_passes(out: Path) -> None:
    edit_table(out, 0, lambda t: t)
    assert validate(out).ok


def unknown_file(rows: list[dict[str, Any]]) -> None:
    rows[0]["segment_file"][0] = 4


def negative_row(rows: list[dict[str, Any]]) -> None:
    rows[0]["segment_row"][0] = -1


def negative_part(rows: list[dict[str, Any]]) -> None:
    rows[0]["segment_part"][0] = -1


def row_beyond_the_input(rows: list[dict[str, Any]]) -> None:
    row = next(r for r in rows if 2 in r["segment_file"])
    row["segment_row"][row["segment_file"].index(2)] = 30


def line_beyond_the_file(rows: list[dict[str, Any]]) -> None:
    """Lines 30 and 31 of 32 may be rows of the input, since two are blank; line 32 may not."""
    row = next(r for r in rows if 0 in r["segment_file"])
    row["segment_row"][row["segment_file"].index(0)] = 32


def a_part_too_far(rows: list[dict[str, Any]]) -> None:
    rows[0]["segment_part"][0] += 5


def another_row_again(rows: list[dict[str, Any]]) -> None:
    one, other = rows[0], rows[1]
    for name in ("segment_file", "segment_row", "segment_part"):
        one[name][0] = other[name][0]


PROVENANCE = [
    unknown_file,
    negative_row,
    negative_part,
    row_beyond_the_input,
    line_beyond_the_file,
    a_part_too_far,
    another_row_again,
]


@pytest.mark.parametrize("damage", PROVENANCE)
def test_provenance_finds(out: Path, damage: Callable[[Any], None]) -> None:
    edit_rows(out, 0, damage)
    assert [f for f in validate(out).failures if f.check == "provenance" and f.pack is not None]


def test_a_row_that_is_packed_and_rejected_is_found(out: Path) -> None:
    origin: dict[str, Any] = {}

    def look(rows: list[dict[str, Any]]) -> None:
        origin.update(file=rows[0]["segment_file"][0], row=rows[0]["segment_row"][0])

    edit_rows(out, 0, look)

    def change(rows: list[dict[str, Any]]) -> None:
        record = next(r for r in rows if r["part"] is None and r["file"] == origin["file"])
        record["row"] = origin["row"]

    edit_named(out, lambda m: m["rejects"][0], change)
    messages = only(validate(out), "provenance")
    assert "packed and rejected" in messages[0]


def test_a_part_that_is_packed_and_rejected_is_found(out: Path) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        record = next(r for r in rows if r["part"] is not None)
        record["part"] = 1 - min(1, record["part"])

    edit_named(out, lambda m: m["rejects"][0], change)
    assert "packed and rejected" in " ".join(only(validate(out), "provenance"))


def test_one_copy_of_a_doubled_row_less_is_found(out: Path) -> None:
    """Its place is taken by a second copy of a row that is to be packed once: sums stay, provenance does not."""

    def change(rows: list[dict[str, Any]]) -> None:
        places = [(r, i) for r in rows for i, f in enumerate(r["segment_file"]) if f == 2]
        r, i = places[0]
        r["segment_row"][i] = next(n for n in range(30) if n != r["segment_row"][i])

    edit_rows(out, 0, change)
    assert [f for f in validate(out).failures if f.check == "provenance" and "times" in f.message]


def test_a_row_in_two_splits_is_found(tmp_path: Path) -> None:
    out = make_output(tmp_path, rows=60)
    shards = manifest_of(out)["shards"]
    train = next(i for i, s in enumerate(shards) if s["split"] == "train")
    valid = next(i for i, s in enumerate(shards) if s["split"] == "valid")
    taken: list[int] = []

    def look(rows: list[dict[str, Any]]) -> None:
        taken.append(next(n for r in rows for n, f in zip(r["segment_row"], r["segment_file"], strict=True) if f == 2))

    def change(rows: list[dict[str, Any]]) -> None:
        row = next(r for r in rows if 2 in r["segment_file"])
        row["segment_row"][row["segment_file"].index(2)] = taken[0]

    edit_rows(out, train, look)
    edit_rows(out, valid, change)
    assert [f for f in validate(out).failures if f.check == "splits" and "two splits" in f.message]


def test_a_shard_that_the_manifest_puts_into_another_split_is_found(out: Path) -> None:
    def change(tree: dict[str, Any]) -> None:
        shard = next(s for s in tree["shards"] if s["split"] == "valid")
        shard["split"] = "train"

    edit_manifest(out, change)
    assert [f for f in validate(out).failures if f.check == "splits" and "'train'" in f.message]


def record_twice(rows: list[dict[str, Any]]) -> None:
    one, other = [r for r in rows if r["part"] is None][:2]
    other.update(row=one["row"], file=one["file"], source=one["source"])


def test_reject_records_are_checked_by_themselves(tmp_path: Path) -> None:
    for n, (change, words) in enumerate(
        [
            (lambda r: r[0].update(file=9), "no such row"),
            (lambda r: r[0].update(row=-1), "no such row"),
            (lambda r: r[0].update(source="b" if r[0]["source"] == "a" else "a"), "source is not"),
            (lambda r: r[0].update(reason="bored"), "none of the known"),
            (record_twice, "two records"),
            (lambda r: r.pop(), "num_rows"),
        ]
    ):
        out = make_output(tmp_path / str(n))
        edit_named(out, lambda m: m["rejects"][0], change)
        assert words in " ".join(f.message for f in validate(out).failures if f.check == "rejects"), words


def test_a_reason_that_does_not_add_up_is_found(out: Path) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        next(r for r in rows if r["part"] is None)["reason"] = "unknown_role"

    edit_named(out, lambda m: m["rejects"][0], change)
    assert "rejected_by_reason" in only(validate(out), "counts")[0]


@pytest.mark.slow
def test_every_count_of_the_manifest_is_checked(tmp_path: Path) -> None:
    """Each number in totals, splits, sources and the shard list is raised by one; all are found."""
    out = make_output(tmp_path, rows=5)
    whole = manifest_of(out)
    tried = 0
    for path in numbers(whole["totals"], ("totals",)) + numbers(whole["splits"], ("splits",)):
        tried += bump(out, whole, path)
    for path in numbers(whole["sources"], ("sources",)) + numbers(whole["shards"], ("shards",)):
        tried += bump(out, whole, path)
    assert tried > 100


def numbers(tree: Any, path: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Paths of all numbers below a value."""
    if isinstance(tree, dict):
        return [p for key, value in tree.items() for p in numbers(value, (*path, key))]
    if isinstance(tree, list):
        return [p for key, value in enumerate(tree) for p in numbers(value, (*path, key))]
    return [path] if isinstance(tree, (int, float)) else []


def bump(out: Path, whole: dict[str, Any], path: tuple[Any, ...]) -> int:
    def change(tree: dict[str, Any]) -> None:
        tree.clear()
        tree.update(copy.deepcopy(whole))
        at = tree
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] += 1

    edit_manifest(out, change)
    report = validate(out)
    assert not report.ok, path
    return 1


def test_accounts_that_do_not_close_are_found(out: Path) -> None:
    def change(tree: dict[str, Any]) -> None:
        for counts in (tree["totals"], tree["sources"]["a"]):
            counts["cut_tokens"] += 1

    edit_manifest(out, change)
    messages = only(validate(out), "accounts")
    assert len(messages) == 2
    assert all("encoded_tokens + repeated_tokens" in m for m in messages)


def test_rows_that_nobody_accounts_for_are_found(out: Path) -> None:
    def change(tree: dict[str, Any]) -> None:
        for counts in (tree["totals"], tree["sources"]["a"]):
            counts["filtered"] -= 1
            counts["left_out"] += 2

    edit_manifest(out, change)
    assert "packed + rejected + filtered + left_out" in only(validate(out), "accounts")[0]


def test_a_manifest_that_does_not_fit_its_config_or_plan_is_found(tmp_path: Path) -> None:
    for n, (edit, words) in enumerate(
        [
            (lambda o: edit_manifest(o, lambda m: m.update(seed=1)), "config.seed"),
            (lambda o: edit_manifest(o, lambda m: m.update(align=2)), "config.packing.align"),
            (lambda o: edit_manifest(o, lambda m: m["config"].update(train_on="all")), "config differs"),
            (lambda o: edit_manifest(o, lambda m: m["inputs"].reverse()), "order"),
            (lambda o: edit_manifest(o, lambda m: m["tokenizer"].update(pad_id=VOCAB)), "pad_id"),
            (lambda o: edit_plan(o, lambda p: p.update(plan_id="0" * 64)), "plan_id"),
            (lambda o: edit_plan(o, lambda p: p["inputs"][0].update(size_bytes=1)), "inputs differ"),
        ]
    ):
        out = make_output(tmp_path / str(n))
        edit(out)
        assert words in " ".join(f.message for f in validate(out).failures if f.check == "manifest"), words


def test_tables_are_compared_with_the_packs(tmp_path: Path) -> None:
    for n, (name, change, words) in enumerate(
        [
            ("packs", lambda r: r[3].update(num_tokens=1), "num_tokens"),
            ("packs", lambda r: r[3].update(group=9), "group"),
            ("packs", lambda r: r[3].update(efficiency=0.5), "efficiency"),
            ("packs", lambda r: r[3].update(shard=r[-1]["shard"]), "shard"),
            ("packs", lambda r: r.pop(), "rows, there are"),
            ("lengths", lambda r: r[0].update(examples=99), "examples"),
            ("lengths", lambda r: r[0].update(source="z"), "examples"),
            ("lengths", lambda r: r.append(dict(r[0])), "twice"),
        ]
    ):
        out = make_output(tmp_path / str(n))
        edit_named(out, lambda m, name=name: m["tables"][name], change)
        assert words in " ".join(only(validate(out), "tables")), words


def test_a_pack_without_room_for_alignment_is_found(tmp_path: Path) -> None:
    out = make_output(tmp_path)

    def change(tree: dict[str, Any]) -> None:
        tree["align"] = tree["config"]["packing"]["align"] = 16

    edit_manifest(out, change)
    edit_plan(out, lambda p: p["config"]["packing"].update(align=16))
    assert "multiples of 16" in " ".join(only(validate(out), "geometry"))


def test_a_pack_of_too_many_segments_is_found(tmp_path: Path) -> None:
    out = make_output(tmp_path)
    edit_manifest(out, lambda m: m["config"]["packing"].update(max_segments=1))
    edit_plan(out, lambda p: p["config"]["packing"].update(max_segments=1))
    assert "max_segments" in " ".join(only(validate(out), "geometry"))


def test_a_footer_with_a_flipped_bit_is_told_and_no_crash(out: Path) -> None:
    """Some bytes of the last shard's footer, three bits each."""
    entry = manifest_of(out)["shards"][-1]
    path = out / entry["path"]
    data = path.read_bytes()
    start, stop = footer_start(data), len(data) - 8
    told = 0
    for at in range(start, stop, 331):
        for bit in (0, 4, 7):
            bad = bytearray(data)
            bad[at] ^= 1 << bit
            path.write_bytes(bad)
            report = validate(out)
            assert not report.ok
            told += any(entry["path"] in str(failure) for failure in report.failures)
    assert told >= (stop - start) // 331 * 3


@pytest.mark.parametrize("key", [b"packsvc.seq_le\xee", b"\xf0" * 15])
def test_a_key_that_is_no_text_is_told(out: Path, key: bytes) -> None:
    path = out / manifest_of(out)["shards"][0]["path"]
    path.write_bytes(path.read_bytes().replace(b"packsvc.seq_len", key))
    assert any("packsvc.seq_len is None" in failure.message for failure in validate(out).failures)


@pytest.mark.parametrize(("change", "found"), [(1, "packs can be read, the footer says"), (-1, "sha256 is")])
def test_a_row_group_that_says_another_number_of_packs_is_told(out: Path, change: int, found: str) -> None:
    path = out / manifest_of(out)["shards"][-1]["path"]
    data, group = path.read_bytes(), pq.read_metadata(path).row_group(0)
    said = zigzag(group.total_byte_size) + b"\x16" + zigzag(group.num_rows)
    at = data.index(said, footer_start(data)) + len(said) - 1
    path.write_bytes(data[:at] + zigzag(group.num_rows + change) + data[at + 1 :])
    assert pq.read_metadata(path).row_group(0).num_rows == group.num_rows + change
    assert any(found in failure.message for failure in validate(out).failures)
