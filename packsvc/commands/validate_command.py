"""`packsvc validate`: is a packed output right?"""

from __future__ import annotations

from typing import Annotated

import typer

from packsvc.commands.options import Address, AsJson, Output
from packsvc.commands.printing import number, print_json, table

SHOWN_FAILURES = 20


def validate(
    out: Output,
    against_sources: Annotated[
        bool, typer.Option("--against-sources", help="Encode the sources again by the slow method and compare.")
    ] = False,
    sample: Annotated[
        int | None, typer.Option("--sample", min=1, metavar="N", help="With --against-sources: N rows at most.")
    ] = None,
    workers: Annotated[
        int,
        typer.Option(
            "--workers", min=0, metavar="N", help="N at a time: shards in threads, sources on an embedded Ray."
        ),
    ] = 0,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Check every invariant of a packed output. Exit 1 when one does not hold.

    \b
    Examples:
      packsvc validate out
      packsvc validate out --against-sources --sample 1000
      packsvc validate s3://bucket/out --json
    """
    if sample is not None and not against_sources:
        raise typer.BadParameter("--sample is a number of rows for --against-sources")
    from packsvc.validation import validate as run

    report = run(out, against_sources=against_sources, sample=sample, workers=workers, address=address)
    if as_json:
        print_json(report.to_json())
    else:
        rows = [
            (
                "failed" if check.failures else "ok",
                check.name,
                f"{number(check.checked)} {check.unit if check.checked != 1 else check.unit.removesuffix('s')}",
                check.failures or None,
                check.what,
            )
            for check in report.checks
        ]
        print(table(("", "check", "looked at", "failures", "of what"), rows))
        for note in report.notes:
            print(f"note: {note}")
        if not report.ok:
            print()
            for failure in report.failures[:SHOWN_FAILURES]:
                print(failure)
            if report.num_failures > SHOWN_FAILURES:
                print(f"... and {report.num_failures - SHOWN_FAILURES:,} more; --json lists the first of each check")
        verdict = "valid" if report.ok else f"NOT valid: {number(report.num_failures)} failures"
        print(f"\n{out}: {verdict} ({number(report.num_packs)} packs, {number(report.num_tokens)} tokens)")
    if not report.ok:
        raise typer.Exit(1)
