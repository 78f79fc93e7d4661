"""A verdict beside the manifest: read back as found, refused on another manifest, left alone by clean."""

from __future__ import annotations

import json

import pytest

from packsvc.cli import main
from packsvc.errors import FormatError, StateError
from packsvc.run import clean
from packsvc.validation import VERDICT, load_verdict, save_verdict, validate
from tests.validation.outputs import make_output


@pytest.fixture
def out(tmp_path):
    return make_output(tmp_path, rows=12)


def touch_manifest(out):
    """Another manifest with the same shards: only its name differs."""
    path = out / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "name": "another"}))


def damage(out):
    """One shard fewer in the totals."""
    path = out / "manifest.json"
    tree = json.loads(path.read_text())
    tree["totals"]["loss_tokens"] += 1
    path.write_text(json.dumps(tree))


def test_a_verdict_is_read_back_as_it_was_found(out):
    report = validate(out)
    saved = save_verdict(report)
    assert saved.ok
    assert load_verdict(out) == saved
    assert load_verdict(out).report == json.loads(json.dumps(report.to_json()))
    assert not [file for file in out.iterdir() if file.suffix == ".tmp"]


def test_a_bad_verdict_stays_bad(out):
    damage(out)
    save_verdict(validate(out))
    assert not load_verdict(out).ok


def test_a_verdict_on_another_manifest_is_refused(out):
    save_verdict(validate(out))
    touch_manifest(out)
    with pytest.raises(StateError, match=r"about another manifest .* --save` again"):
        load_verdict(out)
    save_verdict(validate(out))
    assert load_verdict(out).ok


def test_a_manifest_that_changed_meanwhile_gets_no_verdict(out, tmp_path):
    report = validate(out)
    other = make_output(tmp_path / "other", seed=1, rows=12)
    (out / "manifest.json").write_bytes((other / "manifest.json").read_bytes())
    with pytest.raises(StateError, match="changed while it was validated"):
        save_verdict(report)
    assert not (out / VERDICT).exists()


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"format": 9}', '{"format": 1, "ok": true}'])
def test_what_is_no_verdict_is_not_believed(out, content):
    (out / VERDICT).write_text(content)
    with pytest.raises(FormatError, match="not a verdict"):
        load_verdict(out)


def test_a_verdict_that_was_edited_to_ok_is_not_believed(out):
    damage(out)
    save_verdict(validate(out))
    tree = json.loads((out / VERDICT).read_text())
    (out / VERDICT).write_text(json.dumps({**tree, "ok": True}))
    assert not load_verdict(out).ok


def test_no_verdict_says_how_to_get_one(out, tmp_path):
    with pytest.raises(FormatError, match=r"validate OUT --save"):
        load_verdict(out)
    with pytest.raises(FormatError):
        load_verdict(tmp_path / "nothing")


def test_clean_keeps_a_verdict_and_takes_it_away_with_all(out):
    save_verdict(validate(out))
    assert VERDICT not in clean(str(out)).files
    assert load_verdict(out).ok
    assert VERDICT in clean(str(out), everything=True).files
    assert not (out / VERDICT).exists()


def test_validate_saves_and_shows(out, capsys, monkeypatch):
    monkeypatch.setattr("signal.signal", lambda *rest: None)

    def run(*args):
        with pytest.raises(SystemExit) as ended:
            main(["validate", str(out), *args])
        return ended.value.code or 0, capsys.readouterr()

    assert run("--saved")[0] == 2
    assert run("--save")[0] == 0
    code, shown = run("--saved")
    assert code == 0
    assert ": valid (checked 2" in shown.out
    assert json.loads(run("--saved", "--json")[1].out)["report"]["ok"] is True
    assert run("--saved", "--against-sources")[0] == 2
    touch_manifest(out)
    assert run("--saved")[0] == 2
    damage(out)
    assert run("--save")[0] == 1
    assert run("--saved")[0] == 1
