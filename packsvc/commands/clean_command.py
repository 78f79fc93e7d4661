"""`packsvc clean`: remove what a run left behind."""

from __future__ import annotations

from typing import Annotated

import typer

from packsvc.commands.options import AsJson, Output
from packsvc.commands.printing import print_json, size


def clean(
    out: Output,
    everything: Annotated[bool, typer.Option("--all", help="Remove the output whole, not only leftovers.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell what would be removed.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also while a run seems to be alive.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove files that no plan, commit or manifest of an output names: what interrupted runs left behind.

    \b
    Examples:
      packsvc clean out --dry-run
      packsvc clean out
      packsvc clean out --all
    """
    from packsvc.run import clean as run

    found = run(out, everything=everything, dry_run=dry_run, force=force)
    if as_json:
        print_json({"dry_run": dry_run, "files": found.files, "size_bytes": found.size_bytes, "kept": found.kept})
        return
    for name in found.files:
        print(name)
    verb = "would remove" if dry_run else "removed"
    print(f"{verb} {len(found.files)} files, {size(found.size_bytes)}")
    if found.kept:
        print(f"left {len(found.kept)} files that are not packsvc's: {', '.join(found.kept[:5])}")
