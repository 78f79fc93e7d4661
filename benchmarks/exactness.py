"""Are ids and masks exact? One JSON line per tokenizer and input, and one per chat template.

    python benchmarks/exactness.py [--tokenizer DIR]... [--data PATH]... [--rows N] [--templates]

Without arguments: the quickstart's data with its Qwen3 tokenizer. `--data` names files, folders or globs in any format
that a job reads. For every row that is encoded, the ids are compared with `apply_chat_template(tokenize=True)` of
transformers (tool call arguments as the audit decided that the template sees them), and ids and mask with the slow
way: the tokenizer's own backend with offsets. Every other row is counted under its reason, so that the rows close.
`--templates` audits every chat template that the installed trl carries, and compares its renders.
Exit code 1 where anything differs.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import os
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import numpy as np
from inputs import read_inputs

from packsvc.config import PackJob, parse_job
from packsvc.encode import Encoder, load_encoder
from packsvc.encode.audit import audit_template
from packsvc.encode.messages import prepare_messages
from packsvc.encode.rendered import Decisions
from packsvc.encode.template import TurnTemplate
from packsvc.errors import PacksvcError
from packsvc.types import EncodedBatch, Example, ExampleKind, Reject

QUICKSTART = Path(__file__).resolve().parent.parent / "pipelines" / "quickstart"
DATE = "2026-01-01"
AT_ONCE = 256


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokenizer", action="append", help="a folder; may be given several times")
    parser.add_argument("--data", action="append", help="file, folder or glob; may be given several times")
    parser.add_argument("--rows", type=int, help="rows of each input, evenly spaced; default: all")
    parser.add_argument("--templates", action="store_true", help="audit the chat templates of the installed trl")
    return parser.parse_args()


def make_job(tree: dict[str, Any]) -> PackJob:
    return parse_job({"seq_len": 2**22, "date": DATE, "audit_fraction": 0, **tree}, base=Path.cwd())


def segments(batch: EncodedBatch) -> dict[tuple[int, int], tuple[Any, Any]]:
    """(file, row) to ids and mask."""
    return {
        (int(file), int(row)): (batch.input_ids[a:b], batch.loss_mask[a:b])
        for file, row, (a, b) in zip(batch.file, batch.row, pairwise(batch.offsets.tolist()), strict=True)
    }


def by_transformers(encoder: Encoder, example: Example, decisions: Decisions) -> list[int]:
    messages = prepare_messages(example.messages, decisions)
    found = encoder.tokenizer.apply_chat_template(
        messages, tools=example.tools, tokenize=True, return_dict=True, date_string="01 Jan 2026"
    )
    return list(found["input_ids"])


def compare(encoder: Encoder, examples: Sequence[Example]) -> collections.Counter[str]:
    """What became of some rows, and how many of them agree."""
    counts: collections.Counter[str] = collections.Counter()
    decisions = Decisions.from_json(encoder.settings["decisions"])
    for start in range(0, len(examples), AT_ONCE):
        some = examples[start : start + AT_ONCE]
        fast, slow = encoder.encode(some, source="data"), encoder.encode_slow(some, source="data")
        mine, other = segments(fast), segments(slow)
        counts.update(f"rejected: {reject.reason}" for reject in fast.rejects)
        for example in some:
            key = (example.file, example.row)
            if key not in mine:
                continue
            counts["encoded"] += 1
            ids, mask = mine[key]
            twin = other.get(key)
            counts["masks_equal"] += (
                twin is not None and np.array_equal(ids, twin[0]) and bool(np.array_equal(mask, twin[1]))
            )
            counts["without_target"] += not mask.any()
            if example.kind is ExampleKind.CHAT:
                counts["ids_equal"] += ids.tolist() == by_transformers(encoder, example, decisions)
            else:
                counts["ids_equal"] += twin is not None and np.array_equal(ids, twin[0])
    return counts


def report(**line: Any) -> None:
    print(json.dumps({"benchmark": "exactness", **line}, ensure_ascii=False), flush=True)


def tables(options: argparse.Namespace) -> bool:
    """Compare every input with every tokenizer; True where all agree."""
    good = True
    data = options.data or [str(QUICKSTART / "data")]
    sources = [{"path": os.path.abspath(path), "name": f"input_{i}"} for i, path in enumerate(data)]
    for folder in options.tokenizer or [str(QUICKSTART / "tokenizers" / "qwen3")]:
        job = make_job({"tokenizer": os.path.abspath(folder), "sources": sources})
        encoder = load_encoder(job)
        if encoder.tokenizer.chat_template:
            pin_clock(encoder.tokenizer.get_chat_template())
        whole: collections.Counter[str] = collections.Counter()
        for name, rows in read_inputs(job, rows=options.rows):
            counts = compare(encoder, [row for row in rows if isinstance(row, Example)])
            counts.update(f"rejected: {row.reason}" for row in rows if isinstance(row, Reject))
            counts["rows"] = len(rows)
            whole.update(counts)
            good = told(Path(folder).name, name, counts) and good
        told(Path(folder).name, "all", whole)
    return good


def told(tokenizer: str, name: str, counts: collections.Counter[str]) -> bool:
    """Print one line; True where all rows are accounted for and agree."""
    rejected = {key.removeprefix("rejected: "): n for key, n in sorted(counts.items()) if key.startswith("rejected")}
    numbers = {key: counts[key] for key in ("rows", "encoded", "ids_equal", "masks_equal", "without_target")}
    report(tokenizer=tokenizer, input=name, **numbers, rejected=rejected)
    return (
        counts["rows"] == counts["encoded"] + sum(rejected.values())
        and counts["encoded"] == counts["ids_equal"] == counts["masks_equal"]
        and counts["without_target"] == 0
    )


MARKER = re.compile(
    r"<\|[^|<>\n' ]+\|?>|<[a-z_]+\|>|<(?:start|end)_of_turn>|</?s>|<｜[^｜]+｜>|\[/?[A-Z_]+\]|<end_of_utterance>"
)


def templates() -> bool:
    """Audit trl's templates and render the quickstart's rows through each.

    The tokenizer is the quickstart's, with the markers that a template writes as further control tokens.
    """
    import importlib.util

    import transformers

    spec = importlib.util.find_spec("trl")
    if spec is None:
        print("exactness: trl is not installed; no templates to audit", file=sys.stderr)
        return True
    base = make_job({"tokenizer": "x", "sources": [{"path": str(QUICKSTART / "data"), "name": "quickstart"}]})
    read = [row for _, found in read_inputs(base, rows=40) for row in found]
    rows = [row for row in read if isinstance(row, Example) and row.kind is ExampleKind.CHAT]
    tokenizer = transformers.AutoTokenizer.from_pretrained(QUICKSTART / "tokenizers" / "qwen3", bos_token="<s>")
    good = True
    folder = Path(next(iter(spec.submodule_search_locations or ()))) / "chat_templates"
    for path in sorted(folder.glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        refused, equal, known = renders(source, rows, tokenizer.special_tokens_map)
        good = good and refused + equal == len(rows)
        report(
            template=path.stem,
            rows=len(rows),
            refused_by_the_template=refused,
            renders_equal=equal,
            turns_known=known,
            audit=audit(source, tokenizer),
        )
    return good


def pin_clock(source: str) -> datetime.date:
    """Let a template see the same day through transformers; which day."""
    from transformers.utils import chat_template_utils as utils

    today = datetime.date.fromisoformat(DATE)
    utils._compile_jinja_template(source).environment.globals["strftime_now"] = today.strftime
    return today


def renders(source: str, rows: Sequence[Example], special: dict[str, Any]) -> tuple[int, int, int]:
    """How many rows the template refuses, how many renders equal transformers', and of how many the turns are known."""
    from transformers.utils import chat_template_utils as utils

    today = pin_clock(source)
    turns = TurnTemplate(source, variables=special, date=today)
    refused = equal = known = 0
    for row in rows:
        messages = prepare_messages(row.messages, Decisions())
        try:
            theirs: Any = utils.render_jinja_template(
                [messages], tools=row.tools, chat_template=source, date_string=today.strftime("%d %b %Y"), **special
            )
        except Exception:  # a template is foreign code: whatever it raises is its answer to this row
            refused += 1
            continue
        found = turns.marked(messages, row.tools)
        known += found is not None
        equal += theirs[0][0] == (found.text if found else turns.plain(messages, row.tools))
    return refused, equal, known


def audit(source: str, tokenizer: Any) -> str:
    """What the audit says of a template: passed, or why not."""
    controls = {*tokenizer.all_special_tokens, *MARKER.findall(source)}
    try:
        audit_template(
            tokenizer,
            template=source,
            control_tokens=controls,
            template_kwargs={},
            date=datetime.date.fromisoformat(DATE),
        )
    except PacksvcError as error:
        return " ".join(str(error).split())[:200]
    return "passed"


def main() -> None:
    options = arguments()
    good = templates() if options.templates else tables(options)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
