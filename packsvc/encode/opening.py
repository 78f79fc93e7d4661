"""An encoder for a job: made in the driver with audit and choice of backend, made again in workers from settings.

Settings are plain JSON and go into the plan: the tokenizer's facts, what the audit of the template decided, and a
digest of the ids of all probes. A worker that finds another tokenizer, another template, or other ids refuses to
encode; one that lacks the fast backend uses the tokenizer's own, whose ids are the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import orjson

from packsvc.config import Format, PackJob
from packsvc.encode.audit import audit_template
from packsvc.encode.backends import PROBES, Backend, choose_backend
from packsvc.encode.byte_lengths import byte_lengths
from packsvc.encode.collecting import collector_paused
from packsvc.encode.encoder import Encoder, Engine
from packsvc.encode.paths import Offsets
from packsvc.encode.render import Renderer
from packsvc.encode.rendered import Decisions, RowRefused
from packsvc.encode.tokenizer import LoadedTokenizer, load_tokenizer
from packsvc.errors import EncodeError

_KEPT = 2
_SHAPING = (
    "tokenizer",
    "revision",
    "chat_template",
    "template_kwargs",
    "date",
    "train_on",
    "dropped_reasoning",
    "control_tokens",
)
_engines: dict[bytes, Engine] = {}
_loaded: dict[bytes, tuple[Engine, dict[str, Any], list[str]]] = {}


@collector_paused()
def load_encoder(job: PackJob) -> Encoder:
    """Load a job's tokenizer, audit its chat template, and choose the backend.

    Raises:
        EncodeError: The tokenizer cannot be read, or no exact mask can be had with this template.
    """
    key = _load_key(job)
    if key is not None and key in _loaded:
        engine, settings, lines = _loaded[key]
        _keep(job, settings, engine)
        return Encoder(job, engine=engine, settings=settings, audit_lines=lines)
    loaded = load_tokenizer(job)
    lines = []
    decisions: Decisions | None = None
    stop_ids: list[int] = []
    if loaded.template is None:
        _refuse_chats(job)
        lines.append("no chat template: only text and pretokenized sources can be encoded")
    else:
        audit = audit_template(
            loaded.tokenizer,
            template=loaded.template,
            control_tokens=loaded.control_tokens,
            template_kwargs=job.template_kwargs,
            date=job.date,
        )
        decisions = audit.decisions
        lines += audit.lines
        stop_ids = sorted({i for text in decisions.stops if (i := loaded.backend.token_to_id(text)) is not None})
    engine, why = _engine(job, loaded, decisions)
    lines.append(f"ids by {why}")
    if engine.lengths is None:
        lines.append("token lengths in bytes cannot be told for this tokenizer: every row is masked by offsets, slowly")
    facts = replace(loaded.facts, stop_ids=stop_ids, backend=engine.backend.name)
    settings = {
        "facts": asdict(facts),
        "decisions": None if decisions is None else decisions.to_json(),
        "probe_ids_sha256": _digest(engine.backend, _probes(engine.renderer)),
    }
    _keep(job, settings, engine)
    if key is not None:
        _loaded.clear()
        _loaded[key] = engine, settings, lines
    return Encoder(job, engine=engine, settings=settings, audit_lines=lines)


@collector_paused()
def open_encoder(job: PackJob, settings: dict[str, Any]) -> Encoder:
    """The encoder that `load_encoder` made elsewhere; what it needs is loaded once for each process.

    Raises:
        EncodeError: The tokenizer or template here is not the one of the settings.
    """
    engine = _engines.get(_key(job, settings))
    if engine is None:
        facts = settings["facts"]
        loaded = load_tokenizer(job, revision=facts["revision"])
        for name in ("fingerprint", "template_sha256"):
            here = getattr(loaded.facts, name)
            if here != facts[name]:
                raise EncodeError(
                    f"tokenizer {job.tokenizer!r}: {name} is {here} here and {facts[name]} in the plan. The tokenizer "
                    "or template changed since the plan was made, or differs between machines; use the one of the "
                    "plan, or pack into a new output."
                )
        decisions = None if settings["decisions"] is None else Decisions.from_json(settings["decisions"])
        engine, _ = _engine(job, loaded, decisions)
        digest = _digest(engine.backend, _probes(engine.renderer))
        if digest != settings["probe_ids_sha256"]:
            raise EncodeError(
                f"tokenizer {job.tokenizer!r}: {engine.backend.name} gives other ids for the probe texts than "
                f"{facts['backend']} did when the plan was made. Install the versions of the plan, or pack into a "
                "new output."
            )
        _keep(job, settings, engine)
    return Encoder(job, engine=engine, settings=settings)


def _engine(job: PackJob, loaded: LoadedTokenizer, decisions: Decisions | None) -> tuple[Engine, str]:
    """What encodes, and which backend it uses and why."""
    renderer = None
    if loaded.template is not None:
        renderer = Renderer(
            loaded.tokenizer,
            template=loaded.template,
            control_tokens=loaded.control_tokens,
            template_kwargs=job.template_kwargs,
            date=job.date,
            train_on=job.train_on,
            dropped_reasoning=job.dropped_reasoning,
            control_policy=job.control_tokens,
            decisions=decisions,
        )
    choice = choose_backend(loaded.backend, definition=loaded.definition, probes=_probes(renderer))
    engine = Engine(
        loaded=loaded,
        renderer=renderer,
        backend=choice.backend,
        lengths=byte_lengths(loaded.backend, definition=loaded.definition),
        offsets=Offsets(loaded),
    )
    return engine, choice.why


def _probes(renderer: Renderer | None) -> Sequence[str]:
    """The fixed strings, and conversations of them as this template writes them."""
    if renderer is None:
        return PROBES
    rendered: list[str] = []
    for messages in _conversations():
        try:
            rendered.append(renderer.plain(messages))
        except RowRefused:  # no system message, no second user: the others tell enough
            continue
    return (*PROBES, *rendered)


def _conversations() -> list[list[dict[str, Any]]]:
    turns = [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(PROBES)]
    asked = [{"role": "user", "content": "What is 6 x 7?"}, {"role": "assistant", "content": "\n 42.\n"}]
    return [asked, turns[: len(turns) // 2 * 2], [{"role": "system", "content": "Be\u0301 brief."}, *asked]]


def _digest(backend: Backend, probes: Sequence[str]) -> str:
    flat = backend.encode(probes)
    return hashlib.sha256(flat.ids.astype("<i4").tobytes() + flat.offsets.astype("<i8").tobytes()).hexdigest()


def _refuse_chats(job: PackJob) -> None:
    for source in job.sources:
        if source.format not in (Format.AUTO, Format.TEXT, Format.PRETOKENIZED):
            raise EncodeError(
                f"source {source.name!r} holds chats ({source.format}), and neither tokenizer {job.tokenizer!r} nor "
                "the job has a chat template. Name a template file under `chat_template`."
            )


def _load_key(job: PackJob) -> bytes | None:
    """What `load_encoder` depends on, for a tokenizer in a folder: the job's keys, and its files as they stand."""
    folder = Path(job.tokenizer_path)
    if not folder.is_dir():
        return None
    files = [*folder.iterdir(), *([Path(job.resolve(job.chat_template))] if job.chat_template else [])]
    stats = [(str(f), s.st_size, s.st_mtime_ns, s.st_ino) for f in sorted(files) if f.exists() and (s := f.stat())]
    return orjson.dumps([_shaping(job), [s.format for s in job.sources], stats])


def _key(job: PackJob, settings: dict[str, Any]) -> bytes:
    return orjson.dumps([_shaping(job), job.base, settings], option=orjson.OPT_SORT_KEYS)


def _shaping(job: PackJob) -> dict[str, Any]:
    """The job's keys that an engine is made from."""
    dump = job.dump()
    return {name: dump[name] for name in _SHAPING}


def _keep(job: PackJob, settings: dict[str, Any], engine: Engine) -> None:
    while len(_engines) >= _KEPT:
        del _engines[next(iter(_engines))]
    _engines[_key(job, settings)] = engine
