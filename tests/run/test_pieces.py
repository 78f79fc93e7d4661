"""Plans of many pieces: in arrays what they were as objects, dealt as the slow way deals them, read by parts."""

import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packsvc.plan import permutation
from packsvc.run.json_parts import JsonParts
from packsvc.run.pieces import Groups, Pieces
from packsvc.run.planfile import Plan, canonical_json
from packsvc.run.planning import deal
from packsvc.types import InputFile, Piece, PieceKind

large = st.integers(0, 2**62)
pieces = st.builds(
    Piece,
    file=st.integers(0, 4),
    kind=st.sampled_from(PieceKind),
    start=large,
    stop=large,
    first_row=large,
    num_rows=st.none() | st.integers(0, 30),
    size_bytes=st.integers(0, 2000),
    path=st.none() | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    take=st.none() | st.lists(large, max_size=3).map(tuple),
)


@given(st.lists(st.lists(pieces, max_size=5), max_size=5))
def test_groups_hold_the_pieces_they_were_made_of(items):
    groups = Groups.of(items)
    assert list(groups) == [tuple(group) for group in items]
    assert groups[1:] == [tuple(group) for group in items[1:]]
    assert groups.num_rows == sum(p.num_rows or 0 for group in items for p in group)
    assert groups.size_bytes == [sum(p.size_bytes for p in group) for group in items]
    some = range(0, len(items), 2)
    assert groups.of_kind(PieceKind.ROWS, some) == [p for g in some for p in items[g] if p.kind is PieceKind.ROWS]
    together = Pieces.together([Pieces.of(group) for group in items])
    assert list(together) == [p for group in items for p in group]


def deal_slowly(items, *, sources, max_rows, max_bytes, seed):
    """What `deal` does, with lists."""
    placed = []
    for rank, name in enumerate(sorted(set(sources))):
        mine = [p for p in items if sources[p.file] == name]
        order = permutation(len(mine), seed, 1, rank)
        placed += [((j + 0.5) / len(mine), rank, j, mine[int(i)]) for j, i in enumerate(order)]
    placed.sort(key=lambda entry: entry[:3])
    groups = []
    rows = size = 0
    for _, _, _, piece in placed:
        if not groups or rows + (piece.num_rows or 0) > max_rows or size + piece.size_bytes > max_bytes:
            groups.append([])
            rows = size = 0
        groups[-1].append(piece)
        rows += piece.num_rows or 0
        size += piece.size_bytes
    return [tuple(sorted(g, key=lambda p: (p.file, p.first_row, p.start))) for g in groups]


@given(st.lists(pieces, max_size=40), st.integers(0, 3))
def test_pieces_are_dealt_as_the_slow_way_deals_them(items, seed):
    how = {"sources": ["b", "a", "b", "c", "a"], "max_rows": 50, "max_bytes": 5000, "seed": seed}
    assert list(deal(Pieces.of(items), **how)) == deal_slowly(items, **how)


def plan_of(groups, files=3):
    inputs = tuple(InputFile(path=f"ü-{n}.jsonl", url=f"/ü-{n}", source="a", size_bytes=n) for n in range(files))
    return Plan(plan_id="p", config={}, base="/", inputs=inputs, groups=groups, readings={}, encoder={}, versions={})


@given(st.lists(st.lists(pieces, max_size=3), max_size=4))
def test_a_plan_is_written_as_canonical_json_and_reads_back(items):
    plan = plan_of(Groups.of(items))
    data = plan.dumps()
    assert data == canonical_json(json.loads(data)) + b"\n"
    assert Plan.loads(data) == plan
    assert Plan.loads(json.dumps(json.loads(data), indent=2).encode()) == plan


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def read_by_parts(text):
    parts, tree = JsonParts(text), {}
    for key in parts.members():
        tree[key] = list(parts.elements()) if key == "a" else parts.value()
    return tree


@given(
    st.dictionaries(st.text(max_size=3), json_values, max_size=3), st.lists(json_values, max_size=3), st.integers(0, 3)
)
def test_json_by_parts_is_what_json_reads_at_once(tree, elements, indent):
    tree = {**tree, "a": elements}
    assert read_by_parts(json.dumps(tree, indent=indent or None)) == tree
    text = json.dumps(tree)
    for cut in range(len(text)):
        with pytest.raises(ValueError):
            read_by_parts(text[:cut])
    with pytest.raises(ValueError, match="follows"):
        read_by_parts(text + "7")


def test_a_plan_takes_under_64_bytes_a_piece_and_its_file_is_written_and_read_at_that_price():
    """So 10^9 rows, 124,000 pieces, are 7 MB in the driver and in each worker, and 16 MB of JSON when it is written."""
    n = 16_000
    tracemalloc.start()
    made = (
        Piece(file=0, kind=PieceKind.BYTES, start=i * 10**7, stop=i * 10**7 + 10**7, first_row=i * 8192, num_rows=8192,
              size_bytes=10**7)
        for i in range(n)
    )  # fmt: skip
    plan = plan_of(deal(Pieces.of(made), sources=["a"], max_rows=65536, max_bytes=256_000_000, seed=0), files=1)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    data = plan.dumps()
    _, peak = tracemalloc.get_traced_memory()
    assert held / n < 64
    assert (peak - held) / n < 2.5 * len(data) / n
    tracemalloc.reset_peak()
    again = Plan.loads(data)
    after, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert again == plan
    print(
        f"{held / n:.0f} bytes a piece held, {len(data) / n:.0f} in the file, {(peak - after) / n:.0f} more to read it"
    )
    assert (peak - after) / n < 2.5 * len(data) / n
