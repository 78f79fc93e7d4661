"""`packsvc init`: from data to a commented job file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from packsvc.errors import ConfigError, PacksvcError


def init(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Files, folders, globs or fsspec URLs.")],
    tokenizer: Annotated[str, typer.Option("--tokenizer", metavar="T", help="Folder or hub id of a tokenizer.")],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="The job file to write; - prints it.")
    ] = Path("job.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Write over a job file that is there.")] = False,
) -> None:
    """Look at the data, recognise its format, write a commented job file.

    \b
    Examples:
      packsvc init data/chat/*.jsonl.gz data/alpaca.json --tokenizer ./qwen3
      packsvc init s3://bucket/chat --tokenizer Qwen/Qwen3-8B -o jobs/chat.yaml
    """
    from packsvc.sources import draft_job

    to_stdout = str(output) == "-"
    if output.exists() and not to_stdout and not force:
        raise ConfigError(f"{output}: exists already; name another file with -o, or write over it with --force")
    where = Path("job.yaml") if to_stdout else output
    text = draft_job(paths, tokenizer, job_path=where, drops_reasoning=_drops_reasoning(tokenizer))
    if to_stdout:
        typer.echo(text, nl=False)
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
    typer.echo(f"wrote {output}; next: packsvc pack {output} --dry-run")


def _drops_reasoning(tokenizer: str) -> bool | None:
    """Whether the template drops the reasoning of earlier turns; None, and a warning, where it cannot be read here."""
    from packsvc.config import parse_job
    from packsvc.encode import load_encoder

    job = parse_job({"tokenizer": tokenizer, "sources": [{"path": "-"}]})
    try:
        return bool(load_encoder(job).settings["decisions"]["drops_earlier_reasoning"])
    except PacksvcError as error:
        typer.echo(f"warning: the tokenizer was not looked at, packing will need it: {error}", err=True)
        return None
