"""Why tokens are trained or not, asked of the sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from packsvc.view import show
from tests.validation.encoded import encoded_output


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return encoded_output(tmp_path)


def test_every_token_has_a_reason_and_trained_ones_say_so(out: Path) -> None:
    view = show(out, why=True)
    assert view.notes == []
    tokens = [token for segment in view.segments for token in segment.tokens]
    assert {token.why for token in tokens if token.trained} == {"trained"}
    assert {"prompt", "generation prompt"} <= {str(token.why) for token in tokens if not token.trained}
    assert all(token.why for token in tokens)
    assert "(generation prompt)" in str(view)
    assert "generation prompt" in view.to_html()


def test_a_turn_of_its_own_is_explained_by_its_own_turn(tmp_path: Path) -> None:
    out = encoded_output(tmp_path, turns="each")
    views = [show(out, pack, why=True) for pack in range(10)]
    assert any(segment.part for view in views for segment in view.segments)
    assert not [note for view in views for note in view.notes]


def test_a_row_that_was_cut_has_reasons_as_far_as_it_goes_and_fragments_have_none(tmp_path: Path) -> None:
    cut = encoded_output(tmp_path / "cut", overlong="truncate_right", seq_len=64)
    assert show(cut, why=True).notes == []
    parts = encoded_output(tmp_path / "split", overlong="split", seq_len=48)
    notes = [note for pack in range(12) for note in show(parts, pack, why=True).notes]
    assert notes
    assert all("cut to fit" in note for note in notes)


def test_without_its_sources_the_view_says_what_stands_in_the_way(out: Path) -> None:
    for file in (out.parent / "data").iterdir():
        file.unlink()
    view = show(out, why=True)
    assert len(view.notes) == view.num_segments
    assert "chat-" in view.notes[0] or "math" in view.notes[0]
    (out / "plan.json").unlink()
    assert "there are no reasons" in show(out, why=True).notes[-1]
