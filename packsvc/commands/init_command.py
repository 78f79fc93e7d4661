"""`packsvc init`: from data to a commented job file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from packsvc.errors import ConfigError


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

    if str(output) == "-":
        typer.echo(draft_job(paths, tokenizer=tokenizer, folder=Path.cwd()), nl=False)
        return
    if output.exists() and not force:
        raise ConfigError(f"{output}: exists already; name another file with -o, or write over it with --force")
    text = draft_job(paths, tokenizer=tokenizer, folder=output.parent)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
    typer.echo(f"wrote {output}; next: packsvc pack {output}")
