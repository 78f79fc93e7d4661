"""The command line: registers the commands, nothing else. Rooms are imported inside the commands, when they run."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from packsvc.commands import (
    clean_command,
    export_command,
    init_command,
    jobs_command,
    pack_command,
    probe_command,
    repack_command,
    show_command,
    stats_command,
    submit_command,
    validate_command,
)
from packsvc.commands.door import DEBUG, Debug, raise_interrupt, through_the_door

app = typer.Typer(
    name="packsvc",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"packsvc {version('packsvc')}")
        raise typer.Exit


@app.callback()
def packsvc(
    ctx: typer.Context,
    debug: Debug = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Pack instruction data into fixed-length training sequences with exact masks, and prove that they are right.

    \b
    A first run:
      packsvc init data/ --tokenizer ./my-tokenizer -o job.yaml
      packsvc pack job.yaml
      packsvc validate out
      packsvc stats out
      packsvc show out --pack 0

    \b
    Exit codes:
      0  done
      1  a check failed or a limit was passed
      2  the command line, the job, the input or the data set is not what it must be
      3  cut short (disk full, storage gone, interrupted): run the same command again
    """
    ctx.meta[DEBUG] = debug


COMMANDS: dict[str, Callable[..., None] | typer.Typer] = {
    "init": init_command.init,
    "pack": pack_command.pack,
    "validate": validate_command.validate,
    "probe": probe_command.probe,
    "stats": stats_command.stats,
    "show": show_command.show,
    "repack": repack_command.repack,
    "export": export_command.export,
    "clean": clean_command.clean,
    "submit": submit_command.submit,
    "jobs": jobs_command.jobs,
}
for _name, _command in COMMANDS.items():
    if isinstance(_command, typer.Typer):
        app.add_typer(_command, name=_name)
    else:
        app.command(_name)(through_the_door(_command))


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; ends the process with the command's exit code."""
    signal.signal(signal.SIGTERM, raise_interrupt)
    app(args=list(sys.argv[1:] if args is None else args), prog_name="packsvc")
