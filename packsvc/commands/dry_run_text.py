"""How a dry run looks: what the job would do, and one example with its mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from packsvc.commands.printing import facts, number, size

if TYPE_CHECKING:
    from packsvc.config import PackJob
    from packsvc.run import DryRun

SHOWN_REJECTS = 10
SHOWN_TOKENS = 2000
TRAINED, PROMPT = "bold green", "dim"


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
        console.print("\none example as the model sees it; what is trained is marked and green:")
        console.print(_example(found))


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


def _example(found: DryRun) -> Text:
    """The example's text, marked as `show` marks it: >>> opens and <<< closes what is trained."""
    assert found.example is not None
    text, trained = Text(), False
    tokens = found.encoder.explain(found.example)
    for _, token, weight, _ in tokens[:SHOWN_TOKENS]:
        if (weight > 0) != trained:
            text.append("»" if weight > 0 else "«", style=TRAINED)
            trained = weight > 0
        text.append(token, style=TRAINED if trained else PROMPT)
    if trained:
        text.append("«", style=TRAINED)
    if len(tokens) > SHOWN_TOKENS:
        text.append(f"\n... {len(tokens) - SHOWN_TOKENS} more tokens")
    return text
