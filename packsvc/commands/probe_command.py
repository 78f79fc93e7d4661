"""`packsvc probe`: does this model, called this way, keep packed examples apart?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from packsvc.commands.options import AsJson
from packsvc.commands.printing import print_json, table

if TYPE_CHECKING:
    from packsvc.probe import CallResult

CALL_HELP = (
    "Ways of calling, by commas or again; default: hf_trainer, loop, batch2, all_ones_mask. Also no_seq_idx, "
    "positions, boundaries, mask_4d, ids_only; all: every one."
)


def probe(
    model: Annotated[str, typer.Option("--model", metavar="DIR", help="Folder of a model, or its hub id.")],
    attn: Annotated[
        str | None,
        typer.Option(
            "--attn",
            metavar="IMPL",
            help="sdpa, eager, flash_attention_2, packsvc_varlen, ...; default: what the model itself would take.",
        ),
    ] = None,
    call: Annotated[list[str] | None, typer.Option("--call", metavar="WAY", help=CALL_HELP)] = None,
    dataset: Annotated[
        str | None,
        typer.Option("--dataset", metavar="OUT", help="Probe with packs of this output instead of random words."),
    ] = None,
    config_only: Annotated[
        bool,
        typer.Option("--config-only", help="Read config.json alone and make a small random model of its kind."),
    ] = False,
    device: Annotated[str, typer.Option("--device", help="Where to run: cpu, cuda.")] = "cpu",
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="float32 by default, since noise of half precision hides much.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tell whether a model keeps the examples of a pack apart. Exit 1 when a way of calling leaks.

    All tokens of the first example are replaced: nothing may change in the others, no gradient may reach it, and each
    example must give what it gives alone, its loss too.

    \b
    Examples:
      packsvc probe --model ./my-model
      packsvc probe --model ./my-model --attn packsvc_varlen --dataset out
      packsvc probe --model Qwen/Qwen3-0.6B --config-only --call loop --json
    """
    from packsvc.probe import DEFAULT_CALLS, Call, probe_model

    wanted = [name for names in call for name in names.split(",")] if call else list(DEFAULT_CALLS)
    report = probe_model(
        model,
        attn=attn,
        calls=list(Call) if "all" in wanted else wanted,
        dataset=dataset,
        config_only=config_only,
        device=device,
        dtype=dtype,
    )
    if as_json:
        print_json(report.to_json())
    else:
        rows = [(result.verdict, result.call, *figures_of(result)) for result in report.results]
        print(f"{report.model}: attention {report.attention}, {report.dtype} on {report.device}")
        print(table(("", "called as", "changed", "gradient", "seen", "alone", "loss"), rows))
        for result in report.results:
            if result.why:
                print(f"\n{result.call}: {result.verdict}: {result.why}")
                print(f"  {result.advice}")
        print()
        for note in report.notes:
            print(f"note: {note}")
        verdicts = dict.fromkeys(result.verdict for result in report.results)
        said = [f"{v} as {', '.join(r.call for r in report.results if r.verdict == v)}" for v in verdicts]
        verdict = "keeps examples apart" if report.ok else "does NOT keep examples apart"
        print(f"{report.model}: {verdict}: {'; '.join(said)}")
    if not report.ok:
        raise typer.Exit(1)


def figures_of(result: CallResult) -> list[str | None]:
    """The figures of a line, as text."""
    if result.figures is None:
        return [None] * 5
    f = result.figures
    values = (f.changed, f.gradient, f.seen, f.alone, f.loss_gap)
    return ["-" if value is None else "0" if value == 0 else f"{value:.1e}" for value in values]
