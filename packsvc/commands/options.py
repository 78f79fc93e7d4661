"""Flags that several commands take."""

from __future__ import annotations

from typing import Annotated

import typer

Output = Annotated[str, typer.Argument(metavar="OUT", help="A packed output: folder or fsspec URL.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Address = Annotated[
    str | None, typer.Option("--address", metavar="A", help="A Ray cluster, e.g. auto or ray://host:10001.")
]
Workers = Annotated[
    int | None,
    typer.Option("--workers", min=0, metavar="N", help="CPUs of the embedded Ray; 0: in this process, without Ray."),
]
