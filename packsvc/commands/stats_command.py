"""`packsvc stats`: how well a dataset is packed, and what became of every row."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from packsvc.commands.options import AsJson, Output
from packsvc.commands.printing import facts, print_json, table


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
    from packsvc.statistics import by_reason, by_source, by_split, describe
    from packsvc.statistics import stats as run

    found = run(out)
    if by is None:
        print_json(found.to_json()) if as_json else print(facts(describe(found)))
        return
    rows = {By.SOURCE: by_source, By.SPLIT: by_split, By.REASON: by_reason}[by](found)
    if as_json:
        print_json(rows)
    else:
        print(table(list(rows[0]) if rows else [by.value], [list(row.values()) for row in rows]))


def _print_query(out: str, sql: str, *, as_json: bool) -> None:
    from packsvc.statistics import query

    result = query(out, sql)
    if as_json:
        print_json(result.to_pylist())
    else:
        print(table(result.column_names, [list(row.values()) for row in result.to_pylist()]))
