"""The audit stops a job whose template gives no exact mask, and tells what a template leaves out."""

from __future__ import annotations

import re

import pytest

from packsvc.encode.audit import audit_template
from packsvc.errors import EncodeError
from tests.encode import toys
from tests.encode.templates import DATE, Names, call, chat, controls_of, make_renderer, trl_templates

TEMPLATES = trl_templates()


def audit(source, *, controls=None, eos="</s>", date=DATE, **options):
    return audit_template(
        Names(eos),
        template=source,
        control_tokens=controls_of(source) | {eos} if controls is None else controls,
        template_kwargs=options,
        date=date,
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_trl_template_passes_or_is_refused_with_a_true_reason(name):
    found = audit(TEMPLATES[name])
    assert found.decisions.stops
    assert found.lines[0].startswith("turns end with ")
    # what the findings say of a kind of conversation is what rows of that kind get
    renderer = make_renderer(TEMPLATES[name], decisions=found.decisions)
    content = [{"type": "text", "text": "q"}] if found.decisions.content_findings[:1] == (_PARTS_ONLY,) else "q"
    for role, probe in (("system", "system"), ("tool", "tool call")):
        told = any(re.search(rf"(^|, ){probe}(,|:)", finding) for finding in found.decisions.content_findings)
        messages = {
            "system": [{"role": "system", "content": content}],
            "tool": [
                {"role": "user", "content": content},
                {"role": "assistant", "content": content[:0], "tool_calls": [call({"k": "v"})]},
                {"role": "tool", "tool_call_id": "c4d5e6f7g", "name": "find", "content": content},
            ],
        }[role]
        if role == "system":
            messages += [{"role": "user", "content": content}]
        messages += [{"role": "assistant", "content": content}]
        try:
            renderer.render(messages)
            rendered = True
        except Exception:
            rendered = False
        assert rendered is not told


_PARTS_ONLY = "strings: only lists of text parts are rendered; rows with other content are rejected"


@pytest.mark.parametrize(
    ("name", "arguments", "parts", "stops", "reasoning", "drops"),
    [
        ("qwen3", "verbatim", "joined", ("<|im_end|>",), "known", True),
        ("llama3_1", "parsed", "joined", ("<|eot_id|>",), "unknown", False),
        ("gemma3", "verbatim", "verbatim", ("<end_of_turn>",), "unknown", False),
        ("deepseekv3", "string", "joined", ("<｜end▁of▁sentence｜>",), "unknown", False),
        ("glm4moe", "parsed", "joined", ("<|user|>", "<|observation|>"), "known", True),
        ("gptoss", "parsed", "joined", ("<|return|>", "<|end|>", "<|call|>"), "known", True),
        ("gemma4_v5", "parsed", "verbatim", ("<turn|>", "<|tool_response>"), "known", True),
    ],
)
def test_decisions_written_out(name, arguments, parts, stops, reasoning, drops):
    decisions = audit(TEMPLATES[name]).decisions
    assert (decisions.arguments, decisions.parts, decisions.stops) == (arguments, parts, stops)
    assert (decisions.reasoning, decisions.drops_earlier_reasoning) == (reasoning, drops)
    assert decisions.next_marker_stops is (name == "glm4moe")


def test_m7_a_stop_that_is_not_the_eos_is_told():
    lines = audit(toys.GEM).lines
    assert lines[0] == "turns end with <end_of_turn>"
    assert any("</s>" in line and "EOS" in line for line in lines)
    assert not any("EOS" in line for line in audit(toys.CML, eos="<|im_end|>").lines)


def test_m8_a_last_turn_that_nothing_ends_is_told():
    found = audit(toys.GLM, controls={"<|user|>", "<|assistant|>", "<|tool|>", "<|system|>", "</s>"})
    assert found.decisions.next_marker_stops
    assert any("turns_without_stop" in line for line in found.lines)


def test_m22_markers_of_another_tokenizer_stop_the_job():
    with pytest.raises(EncodeError, match="template of another one"):
        audit(
            "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}"
            "{% if add_generation_prompt %}### assistant:\n{% endif %}",
            controls={"</s>"},
        )
    with pytest.raises(EncodeError, match="template of another one"):
        audit(toys.GEM, controls={"<s>", "</s>", "<|im_end|>"})


@pytest.mark.parametrize(
    ("source", "why"),
    [
        # learns the question as well: the assistant's turn repeats it
        (
            "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
            "{{ loop.previtem.content }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
            "the words of the user message would be learned",
        ),
        # writes a header and shows no generation prompt
        (
            "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}",
            "shows no generation prompt",
        ),
        # shows a generation prompt that its turns do not have
        (
            "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>bot\n' }}{% endif %}",
            "does not stand before it",
        ),
        # changes what it has written
        (
            "{% set all %}{% for m in messages %}{{ ' <|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
            "{% endfor %}{% endset %}{{ all | trim }}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
            "after it has written it",
        ),
        # writes answers somewhere else than their turn
        (
            "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content if m.role == 'user' else '') + "
            "'<|im_end|>\n' }}{% endfor %}"
            "{% for m in messages %}{{ m.content if m.role != 'user' else '' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
            "",
        ),
        # shows no answers at all
        (
            "{% for m in messages %}{{ m.content if m.role == 'user' else '' }}<|im_end|>{% endfor %}",
            "not in the render",
        ),
    ],
)
def test_a_finding_about_the_mask_stops_the_job_and_says_what_to_do(source, why):
    with pytest.raises(EncodeError) as stopped:
        audit(source, eos="<|im_end|>")
    assert why in str(stopped.value)
    assert "chat_template" in str(stopped.value)


def test_a_finding_about_content_is_told_and_the_job_goes_on():
    source = toys.CML.replace(
        "{{ '<|im_start|>'", "{% if m['role'] == 'system' %}{% continue %}{% endif %}{{ '<|im_start|>'", 1
    )
    found = audit(source, eos="<|im_end|>")
    assert any(line.startswith("finding: system") and "text_missing" in line for line in found.lines)
    assert found.decisions.content_findings


def test_m13_dropped_reasoning_is_told():
    assert any("turns: each" in line for line in audit(TEMPLATES["qwen3"]).lines)
    assert any("dropped_reasoning: train" in line for line in audit(toys.CML, eos="<|im_end|>").lines)


def test_t5_a_template_that_asks_for_today_stops_a_job_without_a_date():
    for name in ("gptoss", "llama3_2"):
        with pytest.raises(EncodeError, match="`date: YYYY-MM-DD`"):
            audit(TEMPLATES[name], date=None)
        assert audit(TEMPLATES[name]).decisions.stops
    assert audit(TEMPLATES["qwen3"], date=None).decisions.stops


def test_t5_a_template_with_a_fixed_date_of_its_own_is_told():
    """Its bytes are the same tomorrow, so it stops nothing."""
    assert any("set `date`" in line for line in audit(TEMPLATES["llama3_1"], date=None).lines)
    assert not any("set `date`" in line for line in audit(TEMPLATES["llama3_1"]).lines)


def test_template_kwargs_reach_the_template():
    found = audit(TEMPLATES["qwen3"], enable_thinking=False)
    assert found.decisions.stops == ("<|im_end|>",)


def test_arguments_escaped_twice_are_parsed_and_others_stay():
    escaped = toys.CML.replace(
        "m['content']", "m['content'] + (m['tool_calls'] | tojson if m['tool_calls'] else '')", 1
    )
    assert audit(escaped, eos="<|im_end|>").decisions.arguments == "parsed"
    as_it_is = toys.CML.replace(
        "m['content']",
        "m['content'] + (m.tool_calls[0].function.name ~ m.tool_calls[0].function.arguments if m.tool_calls else '')",
        1,
    )
    assert audit(as_it_is, eos="<|im_end|>").decisions.arguments == "verbatim"


def test_an_audit_tells_the_same_every_time():
    assert audit(TEMPLATES["gemma4_v5"]) == audit(TEMPLATES["gemma4_v5"])


def test_chat_shows_the_audited_template_at_work():
    renderer = make_renderer(TEMPLATES["gemma3"])
    assert renderer.render(chat("a", "b")).spans
