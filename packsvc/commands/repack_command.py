"""`packsvc repack`: other packs of the same segments."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from packsvc.commands.options import Address, AsJson, Output, Workers


class Strategy(StrEnum):
    FFD = "ffd"
    FIRST_FIT_RANDOM = "first_fit_random"
    NEXT_FIT = "next_fit"


def repack(
    out: Output,
    new: Annotated[str, typer.Argument(metavar="NEW", help="Folder or URL of the new output.")],
    seq_len: Annotated[int, typer.Option("--seq-len", min=2, metavar="N", help="Tokens of the new packs.")],
    strategy: Annotated[Strategy, typer.Option("--strategy", help="How segments are laid into packs.")] = Strategy.FFD,
    align: Annotated[
        int, typer.Option("--align", min=1, metavar="M", help="Reserve room to pad segments to a multiple of M.")
    ] = 1,
    workers: Workers = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Pack again from the shards, without tokenizing again: another length, strategy or alignment.

    \b
    Examples:
      packsvc repack out out-8k --seq-len 8192
      packsvc repack out out-cp --seq-len 4096 --align 16
    """
    from packsvc.commands.printing import number, print_packed
    from packsvc.commands.progress_display import ProgressDisplay
    from packsvc.run import overlong_before
    from packsvc.run import repack as run

    if workers is not None and address is not None:
        raise typer.BadParameter("--workers is for the embedded Ray, --address names another; give one of them")
    with ProgressDisplay() as watch:
        manifest = run(
            out,
            new,
            seq_len=seq_len,
            strategy=strategy.value,
            align=align,
            workers=workers,
            address=address,
            watch=watch,
        )
    print_packed(manifest, new, as_json=as_json)
    lost = {name: n for name, n in overlong_before(manifest).items() if n}
    if lost and not as_json:
        said = ", ".join(f"{number(n)} {name}" for name, n in lost.items())
        print(f"rows that were overlong when {out} was packed do not come back: {said}")
