"""A pack as a person reads it, on a terminal, without colours, as a page and as JSON."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from rich.text import Text

from packsvc.config import PackJob, parse_job
from packsvc.encode import load_tokenizer
from packsvc.errors import ConfigError, DamageError, FormatError
from packsvc.types import Counts, InputFile
from packsvc.view import PackView, SegmentView, segment_text, show, view_example, view_tokens
from packsvc.view.visible import visible
from tests.validation.outputs import batch_of, make_output, write_output

TOKENIZER = Path(__file__).parents[2] / "pipelines/quickstart/tokenizers/qwen3"
PROMPT = "<|im_start|>user\nHow much is a <b>🫠</b>?<|im_end|>\n<|im_start|>assistant\n"
ANSWER = "It is\n3 €.\x1b[31m<|im_end|>"


@pytest.fixture(scope="module")
def job() -> PackJob:
    tree = {
        "tokenizer": str(TOKENIZER),
        "sources": [{"path": "data/a.jsonl", "name": "a"}],
        "seq_len": 70,
        "limits": {"max_reject_fraction": 1.0},
    }
    return parse_job(tree, base="/nowhere")


@pytest.fixture(scope="module")
def out(job: PackJob, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One pack of two equal conversations, from rows 4 and 9."""
    loaded = load_tokenizer(job)
    prompt = loaded.backend.encode(PROMPT, add_special_tokens=False).ids
    answer = loaded.backend.encode(ANSWER, add_special_tokens=False).ids
    ids = np.array(prompt + answer, np.int32)
    mask = np.array([False] * len(prompt) + [True] * len(answer))
    segments: list[dict[str, Any]] = [
        {"ids": ids, "mask": mask, "weight": mask.astype(np.float32), "file": 0, "row": row, "part": 0, "split": 0}
        for row in (4, 8)
    ]
    counts = Counts(rows=10, packed=2, left_out=8, encoded_tokens=2 * len(ids))
    return write_output(
        tmp_path_factory.mktemp("show") / "out",
        job=job,
        inputs=[InputFile(path="data/a.jsonl", url="/nowhere", source="a", size_bytes=1000, num_rows=10)],
        batch=batch_of(segments, loss_weights=False),
        copies=[1, 1],
        counts={"a": counts},
        rejects=[],
        facts=loaded.facts,
    )


def printed(view: PackView, **console: Any) -> str:
    stream = io.StringIO()
    Console(file=stream, highlight=False, soft_wrap=True, **console).print(view.to_text())
    return stream.getvalue()


def test_segments_stand_apart_with_their_origin_and_the_tail_is_summed_up(out: Path) -> None:
    view = show(out)
    assert (view.num_segments, len(view.segments), view.num_packs) == (2, 2, 1)
    assert [s.origin for s in view.segments] == [f"data/a.jsonl, row {row}, part 0 (source a)" for row in (4, 8)]
    assert view.padding == 70 - view.num_tokens > 0
    assert f"{view.padding} of padding" in view.summary
    assert view.notes == []
    for segment in view.segments:
        assert "".join(t.text for t in segment.tokens) == PROMPT + ANSWER
        assert "".join(t.text for t in segment.tokens if t.trained) == ANSWER
        assert [t.text for t in segment.tokens if t.control] == ["<|im_start|>", "<|im_end|>"] * 2 or segment.tokens


def test_without_colour_trained_tokens_stand_in_brackets_and_nothing_acts_on_the_terminal(out: Path) -> None:
    text = printed(show(out))
    assert text.count("[[It is↵\n3 €.\\e[31m<|im_end|>]]") == 2
    assert "How much is a <b>🫠</b>?<|im_end|>↵\n" in text
    assert "\x1b" not in text
    assert "-- padding:" in text
    assert str(show(out)) == text


def test_with_colour_trained_tokens_are_coloured_and_not_bracketed(out: Path) -> None:
    text = printed(show(out), force_terminal=True, color_system="truecolor")
    assert "[[" not in text
    assert "trained tokens are green" in text
    assert "\x1b[1;32m" in text
    assert "\x1b[31m" not in text, "an escape in the data stays an escape in words"


def test_one_segment_can_be_asked_for(out: Path) -> None:
    view = show(out, 0, 1)
    assert [s.number for s in view.segments] == [1]
    assert view.segments[0].row == 8
    assert view.segments[0].start == view.num_tokens // 2
    assert "-- padding" not in printed(view)


@pytest.mark.parametrize(("pack", "segment"), [(1, None), (-1, None), (0, 2), (0, -1)])
def test_a_pack_or_segment_that_is_not_there_is_refused_with_the_numbers(out: Path, pack: int, segment: Any) -> None:
    with pytest.raises(ConfigError, match=r"there are [12]"):
        show(out, pack, segment)


def test_the_page_escapes_the_data_and_loads_nothing(out: Path) -> None:
    page = show(out).to_html()
    assert "<b>" not in page
    assert "&lt;b&gt;" in page or ("&lt;" in page and "b" in page)
    assert "http" not in page
    assert "<script" not in page
    assert "\x1b" not in page
    assert 'class="l"' in page
    assert "data/a.jsonl, row 4, part 0" in page


def test_json_holds_every_token(out: Path) -> None:
    tree = json.loads(json.dumps(show(out).to_json()))
    assert sum(len(s["tokens"]) for s in tree["segments"]) == tree["num_tokens"]
    trained = [t for s in tree["segments"] for t in s["tokens"] if t["trained"]]
    assert len(trained) == tree["num_loss_tokens"]
    assert tree["segments"][0]["path"] == "data/a.jsonl"


def test_without_its_tokenizer_ids_are_shown_and_it_is_said(tmp_path: Path) -> None:
    out = make_output(tmp_path, seed=1, loss_weights=True)
    view = show(out, 3)
    assert "could not be read" in view.notes[0]
    token = view.segments[0].tokens[0]
    assert token.text.strip() == str(token.id)
    assert "note: ids stand for texts" in printed(view)
    assert any(0 < t.weight < 1 for s in view.segments for t in s.tokens)


def test_another_tokenizer_of_the_same_name_is_not_trusted(out: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "out"
    shutil.copytree(out, copy)
    tree = json.loads((copy / "manifest.json").read_text())
    tree["tokenizer"]["fingerprint"] = "0" * 64
    (copy / "manifest.json").write_text(json.dumps(tree))
    assert "is not the one that made them" in show(copy).notes[0]


def test_a_damaged_shard_and_a_missing_manifest_are_said(out: Path, tmp_path: Path) -> None:
    made = make_output(tmp_path)
    for file in (made / "shards").iterdir():
        file.write_bytes(b"x" * file.stat().st_size)
    with pytest.raises(DamageError):
        show(made)
    with pytest.raises(FormatError):
        show(tmp_path / "nothing")


def test_an_example_that_is_not_packed_can_be_shown_with_reasons(job: PackJob) -> None:
    loaded = load_tokenizer(job)
    ids = loaded.backend.encode(PROMPT + ANSWER, add_special_tokens=False).ids
    weights = [0.0] * (len(ids) - 2) + [0.5, 1.0]
    why = ["prompt"] * (len(ids) - 2) + ["trained"] * 2
    segment = view_example(ids, weights, loaded=loaded, why=why)
    text = segment_text(segment, marks=True, why=True)
    assert isinstance(text, Text)
    assert "(prompt)" in text.plain
    assert text.plain.endswith("(trained)]]")
    assert segment.tokens[-2].to_json()["weight"] == 0.5


def test_tokens_without_words_are_ids() -> None:
    view = SegmentView(tokens=view_tokens([5, 6], [0, 1], words=None))
    assert segment_text(view, marks=True).plain.endswith("5 [[6 ]]")


def test_what_cannot_be_seen_is_made_visible() -> None:
    assert visible("plain ünïcode 👩‍👩‍👧 text") == "plain ünïcode 👩‍👩‍👧 text"
    assert visible("a\r\n\tb") == "a\\r↵\n⇥\tb"
    assert visible("\x00\x07\u200b\u202e\U000e0041") == "\\0\\x07\\u200b\\u202e\\U000e0041"
    assert visible("no\u00a0break") == "no\u00a0break"
