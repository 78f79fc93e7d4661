"""`packsvc pack`: run a job, or resume it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from packsvc.commands.options import Address, AsJson, Workers
from packsvc.commands.printing import print_json, print_packed

if TYPE_CHECKING:
    from packsvc.config import PackJob


def pack(
    job_file: Annotated[Path | None, typer.Argument(metavar="JOB.yaml", help="The job file.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a key: dotted path and YAML value; may repeat."),
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="OUT", help="Where to write, instead of the job's output.")
    ] = None,
    workers: Workers = None,
    address: Address = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, metavar="N", help="At most N rows of each source, into OUT-limit-N: a trial."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Encode 1,000 rows, print what the job would do, write nothing.")
    ] = False,
    base: Annotated[
        Path | None,
        typer.Option("--base", metavar="DIR", hidden=True, help="Folder of relative paths, instead of the job file's."),
    ] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of the job file.")] = False,
    as_json: AsJson = False,
) -> None:
    """Pack a job's data. The same command again resumes what was interrupted, and does nothing when all is done.

    \b
    Examples:
      packsvc pack job.yaml
      packsvc pack job.yaml --dry-run
      packsvc pack job.yaml --set seq_len=8192 --set packing.align=16 --output out-8k
      packsvc pack job.yaml --workers 8 --limit 1000
    """
    if schema:
        from packsvc.config import PackJob

        print_json(PackJob.model_json_schema())
        return
    if job_file is None:
        raise typer.BadParameter("name the job file; `packsvc init` writes one", param_hint="JOB.yaml")
    if workers is not None and address is not None:
        raise typer.BadParameter("--workers is for the embedded Ray, --address names another; give one of them")
    if dry_run and limit is not None:
        raise typer.BadParameter("--dry-run writes nothing, --limit packs a trial; give one of them")
    from packsvc.config import load_job

    job = load_job(job_file, _overrides(overrides or [], output))
    if base is not None:
        job = job.with_base(base)
    if dry_run:
        _dry_run(job, as_json=as_json)
    else:
        _run(job, workers=workers, address=address, limit=limit, as_json=as_json)


def _overrides(items: list[str], output: str | None) -> dict[str, Any]:
    """`--set` is as in the job file; `--output` is seen from the current folder, like any path of a command line."""
    from packsvc.config import is_url, parse_set

    found = parse_set(items)
    if output is not None:
        found["output"] = output if is_url(output) else os.path.abspath(output)
    return found


def _run(job: PackJob, *, workers: int | None, address: str | None, limit: int | None, as_json: bool) -> None:
    from packsvc.commands.progress_display import ProgressDisplay
    from packsvc.run import pack as run

    with ProgressDisplay() as watch:
        manifest = run(job, workers=workers, address=address, limit=limit, watch=watch)
    out = job.output_url.rstrip("/") + (f"-limit-{limit}" if limit is not None else "")
    print_packed(manifest, out, as_json=as_json)


def _dry_run(job: PackJob, *, as_json: bool) -> None:
    from packsvc.run import dry_run as run

    found = run(job)
    if as_json:
        print_json(found.to_json())
        return
    from packsvc.commands.dry_run_text import print_dry_run

    print_dry_run(found, job)
