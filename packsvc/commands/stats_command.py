"""`packsvc stats`: how well a dataset is packed, and what became of every row."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

import typer

from packsvc.commands.options import AsJson, Output
from packsvc.commands.printing import print_json, summary, table

SOURCE_COLUMNS = ("rows", "packed", "rejected", "filtered", "left_out", "segments", "tokens", "loss_tokens")


class By(StrEnum):
    """What the table of `--by` has a line for."""

    SOURCE = "source"
    SPLIT = "split"
    REASON = "reason"


def stats(
    out: Output,
    by: Annotated[By | None, typer.Option("--by", help="One line for each of these.")] = None,
    sql: Annotated[
        str | None,
        typer.Option("--sql", metavar="QUERY", help="A query over packs, shards, sources, rejects, lengths."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Packing efficiency, and what became of every row and token.

    \b
    Examples:
      packsvc stats out
      packsvc stats out --by source
      packsvc stats out --sql "select reason, count(*) from rejects group by reason"
    """
    if sql is not None:
        if by is not None:
            raise typer.BadParameter("--by and --sql exclude each other")
        _print_query(out, sql, as_json=as_json)
        return
    from packsvc.statistics import stats as run

    found = run(out).to_json()
    if as_json:
        print_json(found if by is None else _rows(found, by))
    elif by is None:
        print(summary(found["totals"]))
    else:
        rows = _rows(found, by)
        columns = list(rows[0]) if rows else [by.value]
        print(table(columns, [list(row.values()) for row in rows]))


def _rows(found: Mapping[str, Any], by: By) -> list[dict[str, Any]]:
    if by is By.REASON:
        reasons = found["totals"]["rejected_by_reason"]
        return [{"reason": reason, "rejected": n} for reason, n in reasons.items()]
    if by is By.SPLIT:
        return [{"split": name, **counts} for name, counts in found["splits"].items()]
    return [
        {
            "source": name,
            **{key: counts[key] for key in SOURCE_COLUMNS},
            "loss_share": counts["loss_tokens"] / counts["tokens"] if counts["tokens"] else 0.0,
        }
        for name, counts in found["sources"].items()
    ]


def _print_query(out: str, sql: str, *, as_json: bool) -> None:
    from packsvc.statistics import query

    result = query(out, sql)
    if as_json:
        print_json(result.to_pylist())
    else:
        print(table(result.column_names, [list(row.values()) for row in result.to_pylist()]))
