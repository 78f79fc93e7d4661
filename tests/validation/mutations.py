"""Random corruptions of one field of a shard, and what each is when nothing finds it."""

from __future__ import annotations

import copy
import random
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from packsvc.validation import validate
from tests.validation.damage import edit_table, manifest_of

INTEGERS = {"int32": 2**31, "int64": 2**62}


@dataclass
class Tally:
    """What became of some mutations, by column."""

    made: Counter[str] = field(default_factory=Counter)
    caught: Counter[str] = field(default_factory=Counter)
    named: Counter[tuple[str, str]] = field(default_factory=Counter)
    missed: list[str] = field(default_factory=list)


def other_value(rng: random.Random, value: Any, type_: pa.DataType) -> Any:
    """Another value of the same type: a neighbour, an edge, or anything."""
    if pa.types.is_boolean(type_):
        return not value
    if pa.types.is_floating(type_):
        return rng.choice([0.0, 1.0, -1.0, 0.5, value / 2, value + 0.25, float("nan"), float("inf"), rng.random()])
    edge = INTEGERS[str(type_)]
    near = [value + 1, value - 1, value + 2, value * 2, -value, value ^ 1, value ^ 4]
    return rng.choice([*near, 0, 1, -1, 30, edge - 1, -edge, rng.randrange(-edge, edge), rng.randrange(0, 300)])


def mutated(rng: random.Random, rows: list[dict[str, Any]], schema: pa.Schema) -> tuple[str, str, Any, Any]:
    """Corrupt one field in place: column, what was done, the field before and after."""
    column = rng.choice(schema.names)
    type_ = schema.field(column).type
    row = rng.choice(rows)
    before = copy.deepcopy(row[column])
    if not pa.types.is_list(type_):
        row[column] = other_value(rng, row[column], type_)
        return column, "replaced", before, row[column]
    values: list[Any] = row[column]
    how = rng.choices(["replaced", "exchanged", "inserted", "removed"], [6, 2, 1, 1])[0]
    at = rng.randrange(len(values))
    if how == "replaced":
        values[at] = other_value(rng, values[at], type_.value_type)
    elif how == "exchanged":
        to = rng.randrange(len(values))
        values[at], values[to] = values[to], values[at]
    elif how == "inserted":
        values.insert(at, other_value(rng, values[at], type_.value_type))
    else:
        del values[at]
    return column, how, before, row[column]


def only_sources_can_tell(column: str, how: str) -> str | None:
    """Why a corruption that leaves everything else consistent cannot be seen in the output itself."""
    if how not in ("replaced", "exchanged"):
        return None
    return {
        "input_ids": "any id inside the vocabulary may be right",
        "loss_weight": "any weight on target may be right",
        "segment_file": "any input of the same source may be right",
        "segment_row": "any row of the input may be right",
        "segment_part": "parts of one row may stand in any order",
    }.get(column)


def harmless(column: str, before: Any, after: Any) -> str | None:
    """Why a corruption changes nothing for a reader."""
    if before == after and column == "loss_weight":
        return "0.0 and -0.0 weigh the same"
    return None


def run_mutations(out: Path, number: int, *, seed: int, against_sources: bool) -> Tally:
    """Corrupt a copy of `out`, validate, and put it back, `number` times."""
    rng = random.Random(seed)
    tally = Tally()
    scratch = out.parent / "mutated"
    while sum(tally.made.values()) < number:
        shutil.copytree(out, scratch)
        shard = rng.randrange(len(manifest_of(scratch)["shards"]))
        done: list[tuple[str, str, Any, Any]] = []

        def change(table: pa.Table, done: list[tuple[str, str, Any, Any]] = done) -> pa.Table:
            rows = table.to_pylist()
            done.append(mutated(rng, rows, table.schema))
            return pa.Table.from_pylist(rows, schema=table.schema)

        try:
            edit_table(scratch, shard, change)
            column, how, before, after = done[0]
            if repr(before) == repr(after):
                continue
            tally.made[column] += 1
            if not validate(scratch, against_sources=against_sources).ok:
                tally.caught[column] += 1
                continue
            reason = harmless(column, before, after)
            if reason is None and not against_sources:
                reason = only_sources_can_tell(column, how)
            if reason is not None:
                tally.named[column, reason] += 1
            else:
                tally.missed.append(f"{column} {how}: {before} -> {after}")
        except (pa.ArrowInvalid, OverflowError):
            continue  # a value that the column cannot hold is no damage
        finally:
            shutil.rmtree(scratch)
    return tally
