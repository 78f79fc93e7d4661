"""The one door through which errors leave: a clear message on stderr and an exit code, no traceback.

Exit codes: 0 done; 1 a check failed or a limit was passed; 2 the command line, the job, the input or the data set
is not what it must be; 3 cut short by the world, run the same command again. Results go to stdout, all else to
stderr. `--debug`, before or after the command's name, shows the traceback instead.
"""

from __future__ import annotations

import errno
import functools
import inspect
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer

from packsvc.errors import PacksvcError, WorldError

DEBUG = "packsvc.debug"
"""Key of `ctx.meta` under which the flag before the command's name stands."""
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

_OUTPUT_ERRNO = {errno.EROFS, errno.EACCES, errno.EPERM}


def through_the_door(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with a `--debug` flag, and with its errors turned into a message and an exit code."""

    @functools.wraps(command)
    def guarded(ctx: typer.Context, debug: bool = False, **arguments: Any) -> None:
        try:
            command(**arguments)
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except BrokenPipeError:
            # Whoever read our stdout has closed it (`packsvc show ... | head`): nothing is wrong.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)
        except KeyboardInterrupt:
            leave("interrupted; run the same command again to resume", WorldError.exit_code)
        except SystemExit as stop:
            # Ray's handler of SIGTERM exits with the signal's number.
            if stop.code != signal.SIGTERM:
                raise
            leave("ended by a signal; run the same command again to resume", WorldError.exit_code)
        except Exception as error:
            if debug or ctx.meta.get(DEBUG, False):
                traceback.print_exc()
            leave(message_of(error), exit_code_of(error))

    signature = inspect.signature(command, eval_str=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    added = [
        inspect.Parameter("ctx", kind, annotation=typer.Context),
        inspect.Parameter("debug", kind, default=False, annotation=Debug),
    ]
    parameters = [p.replace(kind=kind) for p in signature.parameters.values()] + added
    guarded.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    guarded.__annotations__ = {p.name: p.annotation for p in parameters}
    return guarded


def leave(message: str, code: int) -> NoReturn:
    """Print one message on stderr and end the program."""
    sys.stdout.flush()
    print(f"packsvc: {message}", file=sys.stderr)
    sys.exit(code)


def exit_code_of(error: Exception) -> int:
    """The exit code of an error's kind; a bug is a failed check."""
    if isinstance(error, PacksvcError):
        return error.exit_code
    return WorldError.exit_code if isinstance(error, (OSError, MemoryError)) else 1


def message_of(error: Exception) -> str:
    """What a person is told of an error."""
    if isinstance(error, PacksvcError):
        return str(error)
    if isinstance(error, OSError):
        reason = error.strerror or str(error)
        where = f"{error.filename}: " if error.filename else ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason += "; free some space and run the same command again to resume"
        elif error.errno in _OUTPUT_ERRNO:
            reason += "; make it writable and run the same command again"
        return f"{where}{reason}"
    if isinstance(error, MemoryError):
        return "out of memory; use fewer --workers or a smaller packing.group_examples, and run it again to resume"
    return f"unexpected {type(error).__name__}: {error}\nThis is a bug; --debug shows where it happened."


def raise_interrupt(signum: int, frame: Any) -> None:
    """Let SIGTERM end a run as Ctrl-C does: through the door, with what was committed kept."""
    raise KeyboardInterrupt
