"""How results look on stdout: one JSON document, or aligned plain text."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from packsvc.shards import Manifest


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    import orjson

    options = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    sys.stdout.write(orjson.dumps(value, default=_plain, option=options).decode() + "\n")


def _plain(value: Any) -> Any:
    """What JSON has no word for: DuckDB's sums are Decimals; anything else is its text."""
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return str(value)


def number(value: Any) -> str:
    """A value as a person reads it.

    >>> number(245000), number(0.99691), number(None), number(True), number("chat")
    ('245,000', '0.9969', '-', 'yes', 'chat')
    """
    if value is None:
        return "-"
    if isinstance(value, Decimal):
        value = _plain(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if 0.99995 <= value < 1:
            return "0.9999"  # a ratio that falls short of 1 never reads as 1
        return f"{value:.4f}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)


def size(size_bytes: float) -> str:
    """Bytes in the unit that reads best.

    >>> size(900), size(1_234_567)
    ('900 B', '1.2 MB')
    """
    for unit in ("B", "KB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.1f} TB"


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Columns with a heading; numbers to the right, words to the left."""
    kept = [list(row) for row in rows]
    cells = [list(columns), *([number(value) for value in row] for row in kept)]
    right = [
        any(isinstance(row[i], (int, float, Decimal)) for row in kept)
        and not any(isinstance(row[i], str) for row in kept)
        for i in range(len(columns))
    ]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in cells
    )


def facts(values: Mapping[str, str]) -> str:
    """Name and value, one a line, aligned."""
    width = max(map(len, values), default=0)
    return "\n".join(f"  {name.ljust(width)}  {value}" for name, value in values.items())


def shown_path(path: str) -> str:
    """A path as one would type it here.

    >>> shown_path("s3://bucket/out"), shown_path(os.path.join(os.getcwd(), "out"))
    ('s3://bucket/out', 'out')
    """
    if "://" in path:
        return path
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def print_packed(manifest: Manifest, out: str, *, as_json: bool) -> None:
    """What a run made, at its end."""
    if as_json:
        counts = {"totals": manifest.totals, "splits": manifest.splits, "sources": manifest.sources}
        print_json({"output": out, "name": manifest.name, "plan_id": manifest.plan_id, **counts})
    else:
        from packsvc.statistics import describe, stats

        print(f"{manifest.name}: packed into {shown_path(out)}")
        print(facts(describe(stats(out))))
