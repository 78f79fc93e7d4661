"""From figures to one verdict a call, and a report of all.

Isolation is demanded exactly: on the CPU the change and the gradient must be 0. Only on CUDA, and where tokens are
sorted to experts, may a kernel group its sums otherwise when other tokens change; there a thousandth of the logits'
spread is let pass. Leaks are a hundred times that and more.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from packsvc.probe.calls import WHAT, Call
from packsvc.probe.measuring import Figures

ROUNDING = 1e-3
"""Of the spread: where kernels may sum in another order."""
ALONE_EXACT = 1e-4
"""Of the spread, in float32 or wider. A lost window or wrong learned positions gave 0.16 and more."""
ALONE_HALF = 0.3
"""Of the spread, in bfloat16 and float16, whose noise alone reaches 0.05."""
LOSS_EXACT = 2e-5
"""Relative, in float32 or wider."""
LOSS_HALF = 2e-2


class Verdict(StrEnum):
    """What is true of one way of calling."""

    CLEAN = "clean"
    LEAK = "leak"
    """A segment sees another."""
    WRONG = "wrong"
    """No segment sees another, but a segment gives something else than alone: positions, a window, the loss."""
    REFUSED = "refused"
    """The model raises: this way cannot be trained by accident."""
    BLIND = "blind"
    """The control saw nothing, so nothing is proven."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What is let pass."""

    changed: float
    """Of the logits' spread."""
    alone: float
    """Of the logits' spread."""
    loss: float
    """Relative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """One way of calling."""

    call: str
    verdict: Verdict
    figures: Figures | None
    """None when the model raised."""
    failed: tuple[str, ...]
    """Of perturbation, gradient, control, alone, loss, positions."""
    why: str
    """The finding in words, with its figures; empty when clean."""
    advice: str
    """What to change; empty when clean."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "call": self.call,
            "what": WHAT[Call(self.call)] if self.call in set(Call) else self.call,
            "verdict": str(self.verdict),
            "failed": list(self.failed),
            "why": self.why,
            "advice": self.advice,
            "figures": None if self.figures is None else asdict(self.figures),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """All ways of calling that were probed, on one model with one attention."""

    model: str
    attention: str
    dtype: str
    device: str
    dataset: str | None
    lengths: tuple[int, ...]
    """Of the segments of the pack that was used."""
    results: list[CallResult]
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True when at least one way is clean and the others are clean or refused."""
        verdicts = {result.verdict for result in self.results}
        return Verdict.CLEAN in verdicts and verdicts <= {Verdict.CLEAN, Verdict.REFUSED}

    @property
    def leaks(self) -> list[CallResult]:
        """The ways that leak."""
        return [result for result in self.results if result.verdict is Verdict.LEAK]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "ok": self.ok,
            "model": self.model,
            "attention": self.attention,
            "dtype": self.dtype,
            "device": self.device,
            "dataset": self.dataset,
            "lengths": list(self.lengths),
            "calls": [result.to_json() for result in self.results],
            "notes": list(self.notes),
        }


def judge(figures: Figures, limits: Limits) -> tuple[Verdict, tuple[str, ...], str]:
    """The verdict on one call's figures, the checks that failed, and the finding in words."""
    spread = figures.spread
    if not (figures.seen > 0 and figures.own_gradient > 0 and spread > 0 and figures.alone == figures.alone):
        words = f"replacing a segment changes its own logits by {figures.seen:.1e}, of a spread of {spread:.1e}"
        return Verdict.BLIND, ("control",), words
    failed: list[str] = []
    findings: list[str] = []
    # Each is written so that a NaN fails.
    if not figures.changed <= limits.changed * spread:
        failed.append("perturbation")
        findings.append(
            f"replacing one example changes logits of others by {figures.changed:.2g} (spread {spread:.2g})"
        )
    if not abs(figures.gradient) <= 0:
        failed.append("gradient")
        findings.append(f"the loss of others has a gradient of {figures.gradient:.1e} into it")
    if failed:
        return Verdict.LEAK, tuple(failed), "; ".join(findings)
    if not figures.alone <= limits.alone * spread:
        failed.append("alone")
        findings.append(f"logits differ by {figures.alone:.2g} from the example alone (spread {spread:.2g})")
    if figures.loss_gap is not None and not figures.loss_gap <= limits.loss * max(1.0, figures.loss_alone or 0.0):
        failed.append("loss")
        findings.append(f"packed loss {figures.loss:.6f}, one by one {figures.loss_alone:.6f}")
    return (Verdict.WRONG if failed else Verdict.CLEAN), tuple(failed), "; ".join(findings)
