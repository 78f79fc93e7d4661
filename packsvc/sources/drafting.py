"""A first job file, written from a look at the data: what `packsvc init` prints."""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from packsvc.config import Format, PackJob, Source, is_url
from packsvc.errors import SourceError
from packsvc.sources.counting import count_input
from packsvc.sources.examples import read_example
from packsvc.sources.listing import list_inputs
from packsvc.sources.messages import REASONING_FIELDS
from packsvc.sources.reading import sample_files, sample_rows
from packsvc.sources.recognition import CONVERSATION_COLUMNS, Reading, recognise
from packsvc.types import Example, InputFile, RawRow

SAMPLE_ROWS = 2000
COUNTED_BYTES = 256 << 20
"""Sources up to this size on disk are counted exactly."""
_FILES_LOOKED_AT = 64
_THINK_END = "</think>"
_PLAIN = re.compile(r"(?!(?i:true|false|null|yes|no|on|off|y|n)\Z)[A-Za-z./][A-Za-z0-9_./*-]*\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceDraft:
    """One source of a drafted job, and what was seen in it."""

    name: str
    paths: list[str]
    """As the job file has them."""
    reading: Reading
    num_files: int
    num_rows: int | None
    """None where counting would take long."""
    sampled: int
    rejected: dict[str, int] = field(default_factory=dict)
    """Rejects among the sampled rows, by reason."""
    reasoning: bool = False
    fractional_weights: bool = False


def draft_job(
    paths: Sequence[str],
    tokenizer: str,
    *,
    job_path: str | os.PathLike[str],
    drops_reasoning: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> str:
    """The text of a commented job file for this data.

    Args:
        paths: Files, folders, globs or URLs, relative to the current folder.
        tokenizer: Folder or hub id.
        job_path: Where the file will stand; local paths in it become relative to its folder.
        drops_reasoning: Whether the chat template leaves the reasoning of earlier turns out; None: not known.

    Raises:
        SourceError: Nothing is found, or a format is not recognised.
    """
    folder = os.path.dirname(os.path.abspath(job_path))
    sources = [
        draft
        for some in _numbered_together(paths)
        for draft in look_at(some, folder=folder, storage_options=storage_options)
    ]
    return write_job(_distinct(sources), _local(tokenizer, folder), folder=folder, drops_reasoning=drops_reasoning)


def _numbered_together(paths: Sequence[str]) -> list[list[str]]:
    """Paths whose names differ in digits only, as a shell makes them of a glob, are one source."""
    alike: dict[str, list[str]] = {}
    for path in paths:
        folder, _, name = path.rpartition("/")
        alike.setdefault(f"{folder}/{re.sub('[0-9]+', '0', name)}", []).append(path)
    return list(alike.values())


def look_at(
    paths: Sequence[str], *, folder: str, storage_options: Mapping[str, Any] | None = None
) -> list[SourceDraft]:
    """The sources that some paths make: one, or one for each kind of rows in their files."""
    shown = [path if is_url(path) else _local(path, folder) for path in paths]
    job = PackJob(tokenizer="-", sources=[Source(path=shown)]).with_base(folder)
    source = job.sources[0]
    name = (
        source.name if len(shown) == 1 else re.sub(r"[-_.]*[0-9]+([-_.]of[-_.]?[0-9]+)?$", "", source.name) or "source"
    )
    files = list_inputs(source, job=job, storage_options=storage_options)
    kinds = _by_kind(files, source, storage_options)
    if len(kinds) == 1:
        return [_drafted(name, shown, files, kinds[0][1], storage_options)]
    return [
        _drafted(f"{name}-{reading.format}", [_dotted(f.path) for f in some], some, reading, storage_options)
        for some, reading in kinds
    ]


def has_reasoning(rows: Iterable[RawRow], reading: Reading) -> bool:
    """Whether assistants reason in these rows, in a field of its own or between think tags."""
    examples = (read_example(row, reading, source_name="") for row in rows)
    return any(isinstance(example, Example) and _reasons(example) for example in examples)


def _reasons(example: Example) -> bool:
    return any(
        message["role"] == "assistant"
        and (any(map(message.get, REASONING_FIELDS)) or _THINK_END in str(message["content"]))
        for message in example.messages
    )


def _by_kind(
    files: Sequence[InputFile], source: Source, options: Mapping[str, Any] | None
) -> list[tuple[list[InputFile], Reading]]:
    """Files of the same format together. Many files are first tried as one kind, by some of them."""
    if len(files) > _FILES_LOOKED_AT:
        try:
            return [(list(files), recognise(sample_files(files, limit=SAMPLE_ROWS, storage_options=options), source))]
        except SourceError:
            pass
    kinds: dict[tuple[Format, str], tuple[list[InputFile], Reading]] = {}
    empty: list[InputFile] = []
    for file in files:
        rows = sample_rows(file, limit=20, storage_options=options)
        if not rows:
            empty.append(file)
            continue
        try:
            reading = recognise(rows, source)
        except SourceError as error:
            raise SourceError(f"{file.path}: {error}") from error
        kinds.setdefault((reading.format, json.dumps(reading.columns)), ([], reading))[0].append(file)
    if not kinds:
        raise SourceError(f"source {source.name!r}: no rows in {len(empty)} file(s)")
    found = list(kinds.values())
    found[0][0].extend(empty)
    return found


def _drafted(
    name: str,
    paths: list[str],
    files: Sequence[InputFile],
    reading: Reading,
    options: Mapping[str, Any] | None,
) -> SourceDraft:
    rows = sample_files(files, limit=SAMPLE_ROWS, storage_options=options)
    results = [read_example(row, reading, source_name=name) for row in rows]
    examples = [result for result in results if isinstance(result, Example)]
    rejected = Counter(result.reason.value for result in results if not isinstance(result, Example))
    num_rows = None
    if sum(file.size_bytes for file in files) <= COUNTED_BYTES:
        num_rows = sum(count_input(file, storage_options=options).num_rows for file in files)
    return SourceDraft(
        name=name,
        paths=paths,
        reading=reading,
        num_files=len(files),
        num_rows=num_rows,
        sampled=len(rows),
        rejected=dict(rejected),
        reasoning=any(map(_reasons, examples)),
        fractional_weights=any(map(_is_fractional, examples)),
    )


def _is_fractional(example: Example) -> bool:
    parts = [weight for some in example.part_weights if some for weight in some]
    return any(weight not in (None, 0, 1) for weight in (*example.weights, *parts))


def _distinct(sources: Sequence[SourceDraft]) -> list[SourceDraft]:
    """Names given twice get a number."""
    out: list[SourceDraft] = []
    for draft in sources:
        taken = {other.name for other in out}
        numbered = (f"{draft.name}-{n}" for n in range(2, len(taken) + 3))
        name = draft.name if draft.name not in taken else next(n for n in numbered if n not in taken)
        values = {f: getattr(draft, f) for f in SourceDraft.__dataclass_fields__}
        out.append(SourceDraft(**{**values, "name": name}))
    return out


def _local(path: str, folder: str) -> str:
    """A path of the current folder as a job in `folder` writes it; URLs, hub ids and absolute paths stay."""
    if is_url(path) or os.path.isabs(path) or path.startswith("~"):
        return path
    if not os.path.exists(path) and not re.search(r"[*?\[]", path):
        return path
    return _dotted(os.path.relpath(os.path.abspath(path), folder).replace(os.sep, "/"))


def _dotted(path: str) -> str:
    return path if is_url(path) or path.startswith(("/", "..", "~")) else f"./{posixpath.normpath(path)}"


def write_job(sources: Sequence[SourceDraft], tokenizer: str, *, folder: str, drops_reasoning: bool | None) -> str:
    """The job file as text."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", os.path.basename(folder)) or "job"
    lines = [
        "# Made by `packsvc init`. Every key and its default: `packsvc pack --schema`.",
        f"name: {_yaml(name)}",
        f"tokenizer: {_yaml(tokenizer)}",
        "sources:",
    ]
    for draft in sources:
        lines += _source_lines(draft)
    lines += _turns_lines(sources, drops_reasoning)
    lines += [
        "splits: {train: 1.0}        # for example {train: 0.98, valid: 0.02}",
        "train_on: assistant         # assistant, last_assistant or all",
        "seq_len: 4096               # tokens in a pack",
        "overlong: reject            # rows above seq_len: reject, truncate_right, drop_turns, split or error",
        "seed: 0",
        "output: ./out",
    ]
    if any(draft.fractional_weights for draft in sources):
        lines.append("loss_weights: true          # some messages have a weight between 0 and 1")
    return "\n".join(lines) + "\n"


def _source_lines(draft: SourceDraft) -> list[str]:
    if len(draft.paths) == 1:
        lines = [f"  - path: {_yaml(draft.paths[0])}"]
    else:
        lines = ["  - path:", *(f"      - {_yaml(path)}" for path in draft.paths)]
    lines.append(f"    name: {_yaml(draft.name)}{_comment(_amount(draft))}")
    lines.append(f"    format: {draft.reading.format.value}{_comment(draft.reading.why)}")
    columns = {f: c for f, c in draft.reading.columns.items() if f != "messages" or c not in CONVERSATION_COLUMNS}
    if columns:
        lines.append("    columns: {" + ", ".join(f"{f}: {_yaml(c)}" for f, c in columns.items()) + "}")
    if draft.rejected:
        reasons = ", ".join(f"{reason} {n}" for reason, n in sorted(draft.rejected.items()))
        lines.append(f"    # of the first {draft.sampled} rows looked at, these would be rejected: {reasons}")
    return lines


def _amount(draft: SourceDraft) -> str:
    files = f"{draft.num_files:,} file{'s' if draft.num_files != 1 else ''}"
    return f"{draft.num_rows:,} rows in {files}" if draft.num_rows is not None else f"{files}, rows not counted"


def _turns_lines(sources: Sequence[SourceDraft], drops_reasoning: bool | None) -> list[str]:
    reasoning = ", ".join(draft.name for draft in sources if draft.reasoning)
    if not reasoning or drops_reasoning is False:
        return ["turns: whole                # each: one segment per user turn"]
    if drops_reasoning is None:
        return [
            f"# {reasoning}: assistants reason; where the template drops that of earlier turns, use each",
            "turns: whole",
        ]
    return [
        f"# {reasoning}: assistants reason, and the template drops that of earlier turns;",
        "# one segment per user turn trains each answer with its reasoning before it",
        "turns: each",
    ]


def _comment(text: str) -> str:
    return "  # " + re.sub(r"\s+", " ", text)


def _yaml(text: str) -> str:
    """A string as a YAML scalar; a JSON string is one."""
    return text if _PLAIN.match(text) else json.dumps(text)
