"""Probe: a model and a way of calling it -> does it keep the examples of a pack apart?

`models` opens a model (from a config alone made small by `shrinking`; without flash-attn by `flash_stand_in`), `packs`
makes or takes a pack, `calls` turns it into arguments as people call models, `measuring` takes the figures,
`verdicts` judges them, `advice` says what to change. `probing` is the door.
"""

from packsvc.probe.calls import DEFAULT_CALLS, WHAT, Call, Inputs, Segment, inputs_of, segments_of
from packsvc.probe.measuring import Figures
from packsvc.probe.models import ProbedModel, open_model
from packsvc.probe.packs import pack_of, position_findings, random_pack, shortest
from packsvc.probe.probing import figures_of, limits_for, probe_call, probe_model
from packsvc.probe.verdicts import CallResult, Limits, ProbeReport, Verdict, judge

__all__ = [
    "DEFAULT_CALLS",
    "WHAT",
    "Call",
    "CallResult",
    "Figures",
    "Inputs",
    "Limits",
    "ProbeReport",
    "ProbedModel",
    "Segment",
    "Verdict",
    "figures_of",
    "inputs_of",
    "judge",
    "limits_for",
    "open_model",
    "pack_of",
    "position_findings",
    "probe_call",
    "probe_model",
    "random_pack",
    "segments_of",
    "shortest",
]
