"""`packsvc show`: one pack as a person reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from packsvc.commands.options import AsJson, Output
from packsvc.commands.printing import print_json


def show(
    out: Output,
    pack: Annotated[
        int, typer.Option("--pack", min=0, metavar="I", help="Number of the pack, over all shards in manifest order.")
    ] = 0,
    segment: Annotated[
        int | None, typer.Option("--segment", min=0, metavar="J", help="Only this segment of the pack.")
    ] = None,
    why: Annotated[
        bool, typer.Option("--why", help="Also why each token is trained or not; reads the sources again.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a self-contained page instead.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """One pack: its segments apart, trained tokens highlighted, control tokens visible, the origin of each named.

    \b
    Examples:
      packsvc show out
      packsvc show out --pack 12 --segment 3 --why
      packsvc show out --pack 12 --html pack.html
    """
    from packsvc.view import show as run

    view = run(out, pack=pack, segment=segment, why=why)
    if html is not None:
        html.write_text(view.to_html(), encoding="utf-8")
        typer.echo(f"wrote {html}", err=True)
    if as_json:
        print_json(view.to_json())
    elif html is None:
        from rich.console import Console

        Console(highlight=False, soft_wrap=True).print(view.to_text())
