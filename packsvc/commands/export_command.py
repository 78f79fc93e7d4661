"""`packsvc export`: the same packs as another trainer reads them."""

from __future__ import annotations

import sys
import time
from enum import StrEnum
from typing import Annotated

import typer

from packsvc.commands.options import AsJson, Output
from packsvc.commands.printing import number, print_json, shown_path, size, table

PLAIN_SECONDS = 10.0


class To(StrEnum):
    TRL = "trl"
    MEGATRON = "megatron"
    TORCHTUNE = "torchtune"
    OLMO = "olmo"
    EXAMPLES = "examples"


def export(
    out: Output,
    destination: Annotated[str, typer.Argument(metavar="DEST", help="Empty folder or URL to write to.")],
    to: Annotated[To, typer.Option("--to", help="Who reads it.")],
    split: Annotated[
        str | None, typer.Option("--split", metavar="NAME", help="Only this split; default all, a folder each.")
    ] = None,
    pad_to_multiple: Annotated[
        int,
        typer.Option(
            "--pad-to-multiple", min=1, metavar="M", help="Megatron: pad segments to k x M + 1 (its pad_seq_to_mult)."
        ),
    ] = 1,
    eos_id: Annotated[
        int | None,
        typer.Option("--eos-id", min=0, metavar="ID", help="Megatron: the EOS of the tokenizer that will train."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a packed output as another trainer reads it, masks converted to its convention.

    \b
    Formats:
      trl        packed rows for TRL's and Unsloth's SFTTrainer: input_ids, labels, seq_lengths
      megatron   packed Parquet of Megatron-Bridge and NeMo: input_ids, seq_start_id, loss_mask
      torchtune  packed rows: tokens, labels, input_pos, seq_lens
      olmo       OLMo-core arrays: token ids, label mask, document boundaries
      examples   one row an example: input_ids, labels, attention_mask; for Axolotl,
                 LLaMA-Factory and ms-swift, which pack by themselves

    \b
    Examples:
      packsvc export out out-trl --to trl
      packsvc export out s3://bucket/megatron --to megatron --split train
      packsvc export out out-cp --to megatron --pad-to-multiple 4 --eos-id 151645
    """
    from packsvc.export import export_dataset

    made = export_dataset(
        out, destination, to=to.value, split=split, pad_to_multiple=pad_to_multiple, eos_id=eos_id, watch=_Progress()
    )
    if as_json:
        print_json({"destination": destination, **made.to_json()})
        return
    rows = [(name, c.packs, c.segments, c.tokens, c.loss_tokens) for name, c in made.splits.items()]
    print(table(("split", "packs", "segments", "tokens", "loss tokens"), rows))
    total = sum(file.size_bytes for file in made.files)
    print(f"\n{shown_path(destination)}: {number(len(made.files))} files, {size(total)}")
    for note in made.notes:
        print(f"note: {note}")


class _Progress:
    """A line on stderr every ten seconds, and at the end of a longer export."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._spoke = False

    def __call__(self, done: int, num_shards: int, num_tokens: int) -> None:
        now = time.monotonic()
        if now - self._last >= PLAIN_SECONDS or (self._spoke and done == num_shards):
            self._last, self._spoke = now, True
            print(f"shards {done:,}/{num_shards:,}, {num_tokens:,} tokens", file=sys.stderr, flush=True)
