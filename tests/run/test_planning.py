"""Plans: pieces dealt evenly, ids that change with what shapes the output and with nothing else."""

from collections import Counter
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from packsvc.config import parse_job
from packsvc.run.pieces import Groups, Pieces
from packsvc.run.planfile import Plan, differences, identity, identity_hash
from packsvc.run.planning import deal, evenly
from packsvc.types import InputFile, Piece, PieceKind

TOKENIZER = {"files_sha256": {"tokenizer.json": "aa"}, "template_sha256": "bb"}


def job(**changes):
    tree = {"tokenizer": "t", "sources": [{"path": "a.jsonl"}], **changes}
    return parse_job(tree, base="/nowhere")


def file(path="a.jsonl", source="a", size=10, rows=3, **more):
    return InputFile(path=path, url="/x/" + path, source=source, size_bytes=size, num_rows=rows, **more)


def plan_id(j=None, inputs=None, tokenizer=TOKENIZER, limit=None):
    return identity_hash(identity(job=j or job(), inputs=inputs or [file()], tokenizer=tokenizer, limit=limit))


pieces = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 10), st.integers(1, 1000)), max_size=60).map(
    lambda triples: [
        Piece(file=f, kind=PieceKind.BYTES, start=i, stop=i + 1, first_row=i, num_rows=rows, size_bytes=size)
        for i, (f, rows, size) in enumerate(triples)
    ]
)


def place(piece):
    return piece.first_row


@given(pieces, st.integers(0, 5))
def test_every_piece_is_dealt_once_and_groups_keep_their_bounds(items, seed):
    groups = deal(Pieces.of(items), sources=["a", "a", "b", "b", "c"], max_rows=20, max_bytes=1500, seed=seed)
    dealt = [p for g in groups for p in g]
    assert sorted(dealt, key=place) == items
    for group in groups:
        assert sum(p.num_rows for p in group) <= 20
        assert sum(p.size_bytes for p in group) <= 1500


def test_every_group_holds_an_even_share_of_each_source():
    items = [
        Piece(file=f, kind=PieceKind.BYTES, start=i, first_row=i, num_rows=1, size_bytes=1)
        for f, n in ((0, 80), (1, 16))
        for i in range(n)
    ]
    groups = deal(Pieces.of(items), sources=["big", "small"], max_rows=12, max_bytes=10**9, seed=1)
    assert len(groups) == 8
    for group in groups:
        assert Counter(p.file for p in group) in ({0: 10, 1: 2}, {0: 11, 1: 1}, {0: 9, 1: 3})


def test_a_piece_larger_than_a_group_is_a_group_of_its_own():
    items = [
        Piece(file=0, kind=PieceKind.BYTES, first_row=i, start=i, num_rows=n, size_bytes=1)
        for i, n in enumerate([1, 99, 1])
    ]
    groups = deal(Pieces.of(items), sources=["a"], max_rows=10, max_bytes=10**9, seed=0)
    assert [99] in [[p.num_rows for p in g] for g in groups]


def test_the_seed_changes_the_deal():
    items = [Piece(file=0, kind=PieceKind.BYTES, first_row=i, start=i, num_rows=1, size_bytes=1) for i in range(40)]
    deals = [deal(Pieces.of(items), sources=["a"], max_rows=10, max_bytes=10**9, seed=seed) for seed in (0, 0, 1)]
    assert deals[0] == deals[1] != deals[2]


def test_what_does_not_shape_the_output_does_not_change_the_plan_id():
    same = [
        job(name="other"),
        job(output="elsewhere"),
        job(limits={"max_reject_fraction": 0.5}),
        job(audit_fraction=0.5),
    ]
    assert {plan_id(j) for j in same} == {plan_id()}
    touched = [file(mtime=5.0, etag="e", content_hash="c")]
    assert plan_id(inputs=touched) == plan_id()


def test_whatever_shapes_the_output_changes_the_plan_id():
    others = [
        plan_id(job(seq_len=128)),
        plan_id(job(seed=1)),
        plan_id(job(packing={"align": 4})),
        plan_id(job(compression="none")),
        plan_id(job(sources=[{"path": "a.jsonl", "weight": 2}])),
        plan_id(inputs=[file(size=11)]),
        plan_id(inputs=[file(rows=4)]),
        plan_id(inputs=[file(path="b.jsonl")]),
        plan_id(tokenizer={**TOKENIZER, "template_sha256": "cc"}),
        plan_id(tokenizer={**TOKENIZER, "files_sha256": {"tokenizer.json": "ab"}}),
        plan_id(limit=5),
        plan_id(),
    ]
    assert len(set(others)) == len(others)


def test_differences_name_each_part_that_changed():
    old = identity(job=job(), inputs=[file(), file("b.jsonl")], tokenizer=TOKENIZER, limit=None)
    new = identity(
        job=job(seq_len=128, packing={"align": 2}),
        inputs=[file(size=11), file("c.jsonl")],
        tokenizer={"files_sha256": {"tokenizer.json": "zz"}, "template_sha256": "yy"},
        limit=3,
    )
    text = "; ".join(differences(old, new))
    for part in ("seq_len: 4096 -> 128", "packing.align: 1 -> 2", "a.jsonl: 10 bytes", "b.jsonl of source a is gone"):
        assert part in text
    for part in ("c.jsonl of source a is new", "tokenizer file tokenizer.json", "template bytes", "limit None -> 3"):
        assert part in text
    assert differences(old, old) == []


def test_a_plan_reads_back_as_it_was_written():
    plan = Plan(
        plan_id="p",
        config=job().dump(),
        base="/somewhere",
        inputs=(file(mtime=1.5),),
        groups=Groups.of(
            [
                (Piece(file=0, kind=PieceKind.WHOLE, num_rows=3, take=(0, 2)),),
                (Piece(file=0, kind=PieceKind.ROWS, stop=4), Piece(file=0, kind=PieceKind.RECUT, path="recut/ü-0")),
            ]
        ),
        readings={"a": {"format": "messages"}},
        encoder={"facts": {}},
        versions={"numpy": "2"},
    )
    assert Plan.loads(plan.dumps()) == plan


def test_a_moved_plan_finds_its_inputs_beside_the_job():
    plan = Plan(
        plan_id="p",
        config=job().dump(),
        base="/old",
        inputs=(file(),),
        groups=Groups.of(()),
        readings={},
        encoder={},
        versions={},
    )
    assert plan.moved("/new/place").inputs[0].url == str(Path("/new/place/a.jsonl"))


@given(st.lists(st.integers(), unique=True, max_size=30), st.integers(1, 10))
def test_evenly_keeps_order_and_begins_with_the_first(items, n):
    found = evenly(items, n)
    assert len(found) == min(n, len(items))
    assert found == [x for x in items if x in found]
    assert not items or found[0] == items[0]
