"""Figures in words: what a person wants to know of a packed output, one fact a line, and tables of it."""

from __future__ import annotations

from typing import Any

from packsvc.statistics.figures import Stats, ratio

EXPLAINED = {
    "filtered": "rows left out by `where`",
    "left_out": "rows left out by weight",
    "rejected_parts": "refused parts of packed rows",
    "truncated": "rows cut to fit",
    "split": "rows cut into fragments",
    "reasoning_dropped": "trained turns without loss: the template leaves their reasoning out",
    "turns_without_stop": "trained turns that no stop token ends",
    "edge_tokens": "tokens across the start of an answer, counted as prompt",
    "cut_tokens": "tokens cut off",
    "rejected_tokens": "tokens of rejected rows",
    "repeated_tokens": "tokens packed again, by weight or as a repeated prompt",
}
SOURCE_COLUMNS = (
    "rows",
    "packed",
    "rejected",
    "filtered",
    "left_out",
    "segments",
    "tokens",
    "loss_tokens",
    "loss_share",
    "max_segment_tokens",
)
SPLIT_COLUMNS = ("packs", "segments", "tokens", "loss_tokens", "loss_share", "padding_tokens", "efficiency")


def describe(found: Stats) -> dict[str, str]:
    """Name and figure of every fact worth a line; what is 0 and would be is left out."""
    totals = found.totals
    places = totals["packs"] * found.seq_len
    reasons = ", ".join(f"{reason} {number:,}" for reason, number in totals["rejected_by_reason"].items())
    lines = {
        "rows": f"{totals['rows']:,}",
        "packed": f"{totals['packed']:,} ({ratio(totals['packed'], totals['rows']):.1%})",
        "rejected": f"{totals['rejected']:,} ({ratio(totals['rejected'], totals['rows']):.2%})"
        + (f": {reasons}" if reasons else ""),
        "packs": f"{totals['packs']:,} of {found.seq_len:,} tokens; the emptiest holds {totals['min_pack_tokens']:,}",
        "segments": f"{totals['segments']:,}, {ratio(totals['segments'], totals['packs']):.1f} a pack, "
        f"at most {totals['max_segments']:,}",
        "efficiency": shown_ratio(totals["efficiency"]),
        "tokens": f"{totals['tokens']:,} of {places:,} places",
        "padding": f"{totals['padding_tokens']:,} tokens ({ratio(totals['padding_tokens'], places):.2%})",
        "loss tokens": f"{totals['loss_tokens']:,} ({found.loss_share:.1%} of the tokens)",
        "segment lengths": f"mean {found.mean_length:,.0f}"
        + "".join(f", {name} {value:,}" for name, value in found.lengths.items()),
        "attention": f"{ratio(totals['sum_squared_lengths'], places * found.seq_len):.1%} of the cost of dense causal "
        "attention over full packs",
    }
    if found.alignment is not None:
        aligned = found.alignment
        lines["alignment"] = (
            f"{aligned.reserved_tokens:,} tokens reserved to pad segments to multiples of {aligned.align} "
            f"({100 * aligned.efficiency_cost:.2f} points of efficiency)"
        )
    for key, words in EXPLAINED.items():
        if totals[key]:
            lines[key.replace("_", " ")] = f"{totals[key]:,} {words}"
    return lines


def by_source(found: Stats) -> list[dict[str, Any]]:
    """One line for each source."""
    return [{"source": name, **_chosen(counts, SOURCE_COLUMNS)} for name, counts in found.sources.items()]


def by_split(found: Stats) -> list[dict[str, Any]]:
    """One line for each split."""
    return [{"split": name, **_chosen(counts, SPLIT_COLUMNS)} for name, counts in found.splits.items()]


def by_reason(found: Stats) -> list[dict[str, Any]]:
    """One line for each reason of a reject and source that has it."""
    return [
        {"reason": reason, "source": name, "rejected": number, "share_of_rows": ratio(number, counts["rows"])}
        for name, counts in found.sources.items()
        for reason, number in counts["rejected_by_reason"].items()
    ]


def shown_ratio(value: float) -> str:
    """A ratio with four digits; what falls short of 1 never reads as 1.

    >>> shown_ratio(0.99691), shown_ratio(0.99999), shown_ratio(1.0)
    ('0.9969', '0.9999', '1.0000')
    """
    return f"{min(value, 0.9999) if value < 1 else value:.4f}"


def _chosen(counts: dict[str, Any], columns: tuple[str, ...]) -> dict[str, Any]:
    values = {**counts, "loss_share": ratio(counts["loss_tokens"], counts["tokens"])}
    return {column: values[column] for column in columns}
