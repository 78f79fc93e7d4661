import dataclasses
import json
import shutil

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from packsvc.encode.tokenizer import control_tokens, fingerprint, load_tokenizer
from packsvc.errors import EncodeError
from tests.encode import toys


def test_facts_name_everything_that_shapes_ids_and_no_weights(tmp_path):
    folder = toys.save(toys.english(), tmp_path / "t")
    (tmp_path / "t" / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "t" / "config.json").write_text("{}")
    loaded = load_tokenizer(toys.job(folder))
    facts = loaded.facts
    assert set(facts.files_sha256) == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert facts.id == folder
    assert facts.revision is None
    assert facts.vocab_size == 1 + max(loaded.backend.get_vocab().values())
    assert facts.pad_id == loaded.backend.token_to_id("<pad>")
    assert len(facts.fingerprint) == len(facts.template_sha256) == 64


@pytest.mark.parametrize(("pad", "eos", "expected"), [("<pad>", "</s>", "<pad>"), (None, "</s>", "</s>")])
def test_the_pad_id_is_the_pad_token_else_eos(tmp_path, pad, eos, expected):
    loaded = load_tokenizer(toys.job(toys.save(toys.english(), tmp_path / "t", pad=pad, eos=eos)))
    assert loaded.facts.pad_id == loaded.backend.token_to_id(expected)


def test_the_pad_id_is_0_without_pad_and_eos(tmp_path):
    assert load_tokenizer(toys.job(toys.save(toys.english(), tmp_path / "t", pad=None, eos=None))).facts.pad_id == 0


def test_saving_again_keeps_the_fingerprint_though_files_change(tmp_path):
    folder = toys.save(toys.english(), tmp_path / "one")
    loaded = load_tokenizer(toys.job(folder))
    loaded.tokenizer.save_pretrained(tmp_path / "two")
    file = tmp_path / "two" / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()), indent=1))
    again = load_tokenizer(toys.job(str(tmp_path / "two"))).facts
    assert again.fingerprint == loaded.facts.fingerprint
    assert again.files_sha256 != loaded.facts.files_sha256


@pytest.mark.parametrize(
    "other",
    [
        toys.merging(),
        toys.english(cut=False),
        toys.english(added=[AddedToken("<extra>")]),
        toys.english(special=[*toys._MARKERS, "<more>"]),
    ],
)
def test_another_tokenizer_has_another_fingerprint(other):
    assert fingerprint(other) != fingerprint(toys.english())
    assert fingerprint(toys.english()) == fingerprint(toys.english())


def test_t10_one_byte_of_the_template_changes_its_hash_and_nothing_else(tmp_path):
    folder = toys.save(toys.english(), tmp_path / "t")
    own = load_tokenizer(toys.job(folder))
    (tmp_path / "other.jinja").write_text(toys.CML + " ")
    job = toys.job(folder, chat_template="other.jinja").with_base(tmp_path)
    other = load_tokenizer(job)
    assert other.template == toys.CML + " " == other.tokenizer.chat_template
    assert other.facts.template_sha256 != own.facts.template_sha256
    assert other.facts.files_sha256 == {**own.facts.files_sha256, "other.jinja": other.facts.template_sha256}
    changed = {
        f.name for f in dataclasses.fields(own.facts) if getattr(own.facts, f.name) != getattr(other.facts, f.name)
    }
    assert changed == {"template_sha256", "files_sha256"}


def test_a_tokenizer_without_a_template_is_loaded_without_one(tmp_path):
    assert load_tokenizer(toys.job(toys.save(toys.english(), tmp_path / "t", template=None))).template is None


def test_m17_no_padding_or_truncation_of_the_files_is_left_on(tmp_path):
    tokenizer = toys.english()
    tokenizer.enable_padding(direction="left", length=64, pad_id=7)
    tokenizer.enable_truncation(max_length=3)
    backend = load_tokenizer(toys.job(toys.save(tokenizer, tmp_path / "t", padding_side="left"))).backend
    assert (backend.padding, backend.truncation) == (None, None)
    assert len(backend.encode("one two three four five", add_special_tokens=False).ids) > 3


def test_a_missing_folder_is_named(tmp_path):
    job = toys.job("./nowhere").with_base(tmp_path)
    with pytest.raises(EncodeError, match=r"no folder .*nowhere"):
        load_tokenizer(job)


def test_a_hub_id_that_cannot_be_read_says_so_in_one_line(tmp_path):
    with pytest.raises(EncodeError, match="neither a folder") as caught:
        load_tokenizer(toys.job("someone/nothing-here").with_base(tmp_path))
    assert "\n" not in str(caught.value)
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize("damage", ["{", '{"version": "1.0"}', ""])
def test_a_damaged_tokenizer_file_is_an_encode_error_with_the_folder(tmp_path, damage):
    folder = toys.save(toys.english(), tmp_path / "t")
    (tmp_path / "t" / "tokenizer.json").write_text(damage)
    with pytest.raises(EncodeError, match="cannot be read") as caught:
        load_tokenizer(toys.job(folder))
    assert str(tmp_path / "t") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_folder_is_an_encode_error(tmp_path):
    (tmp_path / "t").mkdir()
    with pytest.raises(EncodeError, match="cannot be read"):
        load_tokenizer(toys.job(str(tmp_path / "t")))


def test_a_slow_tokenizer_is_refused(tmp_path, monkeypatch):
    folder = toys.save(toys.english(), tmp_path / "t")

    class Slow:
        chat_template = toys.CML

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *a, **k: Slow())
    with pytest.raises(EncodeError, match="slow tokenizer"):
        load_tokenizer(toys.job(folder))


def test_dropout_is_refused_since_ids_would_be_random(tmp_path):
    tokenizer = toys.english()
    tokenizer.model.dropout = 0.5
    with pytest.raises(EncodeError, match="at random"):
        load_tokenizer(toys.job(toys.save(tokenizer, tmp_path / "t")))


def test_several_templates_are_refused_by_name(tmp_path):
    folder = toys.save(toys.english(), tmp_path / "t", template=None)
    config = tmp_path / "t" / "tokenizer_config.json"
    tree = json.loads(config.read_text())
    tree["chat_template"] = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    config.write_text(json.dumps(tree))
    with pytest.raises(EncodeError, match="default, tool_use"):
        load_tokenizer(toys.job(folder))


@pytest.mark.parametrize("data", [None, b"\xff\xfe"])
def test_an_unreadable_template_file_is_named(tmp_path, data):
    folder = toys.save(toys.english(), tmp_path / "t")
    if data is not None:
        (tmp_path / "c.jinja").write_bytes(data)
    with pytest.raises(EncodeError, match=r"chat_template .*c\.jinja cannot be read"):
        load_tokenizer(toys.job(folder, chat_template="c.jinja").with_base(tmp_path))


def test_control_tokens_are_special_ones_and_markers_that_the_template_writes():
    plain = [AddedToken(t) for t in ("<|User|>", "<|Other|>", "<tool_call>", "</tool_call>", "<think>", "\n\n")]
    backend = toys.english(special=["<s>", "</s>", "[THINK]"], added=plain)
    template = "<|User|>{{ x }}\n\n<tool_call></tool_call><think>"
    assert control_tokens(backend, template) == ("</s>", "<s>", "<|User|>")
    assert control_tokens(backend, template, ["<|Other|>"]) == ("</s>", "<s>", "<|Other|>", "<|User|>")


def test_folders_copied_elsewhere_have_the_same_facts(tmp_path):
    folder = toys.save(toys.english(), tmp_path / "a")
    shutil.copytree(folder, tmp_path / "b")
    one, two = (load_tokenizer(toys.job(str(tmp_path / name))).facts for name in "ab")
    assert dataclasses.replace(one, id="") == dataclasses.replace(two, id="")
