"""How a dry run looks: what the job would do, and one example with its mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from packsvc.commands.printing import facts, number, size
from packsvc.view import tokens_text, view_tokens, words_from

if TYPE_CHECKING:
    from packsvc.config import PackJob
    from packsvc.run import DryRun
    from packsvc.types import Example

SHOWN_REJECTS = 10
SHOWN_TOKENS = 2000


def print_dry_run(found: DryRun, job: PackJob) -> None:
    """Print all of it on stdout."""
    console = Console(highlight=False, soft_wrap=True)
    for line in found.audit_lines:
        console.print(line, markup=False)
    for name, why in found.readings.items():
        console.print(f"source {name}: {why}", markup=False)
    console.print(f"\n{job.name}: nothing was written; estimates are from {number(found.counts.rows)} rows")
    console.print(facts(_estimates(found, job)), markup=False)
    if found.rejects:
        console.print("\nrejected rows of the sample:")
        for reject in found.rejects[:SHOWN_REJECTS]:
            console.print(
                f"  {reject.source}, file {reject.file}, row {reject.row}: {reject.reason}: {reject.detail}",
                markup=False,
            )
        if len(found.rejects) > SHOWN_REJECTS:
            console.print(f"  ... and {len(found.rejects) - SHOWN_REJECTS} more")
    if found.example is not None:
        console.print(
            "\none example as the model sees it; [[ and ]] enclose what is trained, ( ) says why or why not:",
            markup=False,
        )
        console.print(_example(found, found.example))


def _estimates(found: DryRun, job: PackJob) -> dict[str, str]:
    counts = found.counts
    reasons = ", ".join(f"{reason} {n}" for reason, n in sorted(counts.rejected_by_reason.items()))
    share = counts.rejected / counts.rows if counts.rows else 0.0
    overlong = counts.rejected_by_reason.get("overlong", 0)
    return {
        "inputs": f"{number(found.num_files)} files, {size(found.input_bytes)}",
        "rows": f"about {number(found.estimated_rows)} in {number(found.estimated_groups)} groups",
        "packs": f"about {number(found.estimated_packs)} of {number(job.seq_len)} tokens",
        "output": f"about {size(found.estimated_output_bytes)} in {job.output_url}",
        "efficiency": f"{found.efficiency:.4f} expected",
        "lengths": ", ".join(f"{name} {number(value)}" for name, value in found.length_percentiles.items()),
        "loss tokens": f"{found.num_loss_tokens / found.num_tokens:.1%} of the tokens" if found.num_tokens else "none",
        "overlong": number(overlong),
        "rejected": f"{number(counts.rejected)} ({share:.2%})" + (f": {reasons}" if reasons else ""),
    }


def _example(found: DryRun, example: Example) -> Text:
    """The example as `packsvc show` shows a segment, with the reason for each run of tokens."""
    notes = found.encoder.explain(example)[:SHOWN_TOKENS]
    tokens = view_tokens(
        [note.id for note in notes],
        [note.weight for note in notes],
        words=words_from(found.encoder.loaded),
        why=[note.why for note in notes],
    )
    return tokens_text(tokens, marks=True, why=True)
