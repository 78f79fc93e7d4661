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
    save: Annotated[
        bool, typer.Option("--save", help="Store the verdict beside the manifest, with the manifest's sha256.")
    ] = False,
    saved: Annotated[
        bool, typer.Option("--saved", help="Check nothing: show the stored verdict, if it is about this manifest.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check every invariant of a packed output. Exit 1 when one does not hold.

    \b
    Examples:
      packsvc validate out
      packsvc validate out --against-sources --sample 1000
      packsvc validate s3://bucket/out --json
      packsvc validate out --save
    """
    if sample is not None and not against_sources:
        raise typer.BadParameter("--sample is a number of rows for --against-sources")
    if saved:
        if save or against_sources:
            raise typer.BadParameter("--saved only shows what is stored")
        show_stored(out, as_json=as_json)
        return
    from packsvc.validation import save_verdict
    from packsvc.validation import validate as run

    report = run(out, against_sources=against_sources, sample=sample, workers=workers, address=address)
    if save:
        save_verdict(report)
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


def show_stored(out: str, *, as_json: bool) -> None:
    """A verdict that was stored; exit 1 when it is that the output is not valid."""
    from packsvc.validation import load_verdict

    verdict = load_verdict(out)
    if as_json:
        print_json(verdict.to_json())
    else:
        word = "valid" if verdict.ok else f"NOT valid: {number(verdict.report['num_failures'])} failures"
        how = ", against its sources too" if verdict.report["against_sources"] else ""
        print(f"{out}: {word} (checked {verdict.validated_at} by packsvc {verdict.packsvc_version}{how})")
    if not verdict.ok:
        raise typer.Exit(1)
