"""Response spans: from the end of the generation prompt through the stop, for every kind of template."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import Environment

from packsvc.encode.controls import Controls
from packsvc.encode.rendered import RowRefused
from packsvc.encode.spans import _tail_dependence
from packsvc.types import Reason
from tests.encode import toys
from tests.encode.templates import call, chat, make_renderer, show, trl_templates

TEMPLATES = trl_templates()
HEADERLESS = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ m.content + '</s>' }}{% endif %}{% endfor %}"
)
RENDERERS = {
    "cml": make_renderer(toys.CML, eos="<|im_end|>"),
    "gem": make_renderer(toys.GEM),
    "glm": make_renderer(toys.GLM, controls={"<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "</s>"}),
    "headerless": make_renderer(HEADERLESS, controls={"[INST]", "[/INST]", "</s>"}),
}
for _name in ("qwen3", "gptoss", "deepseekv3", "gemma4_v5", "glm4moe", "qwen3_5_think", "llama3_1", "cohere2", "phi3"):
    RENDERERS[_name] = make_renderer(TEMPLATES[_name])


def learned(name, messages, tools=None):
    rendered = RENDERERS[name].render(messages, tools)
    return [rendered.text[s.start : s.end] for s in rendered.spans]


def test_a_chatml_conversation_written_out():
    rendered = RENDERERS["cml"].render(chat("hi", "yes", "ok", "no"))
    assert show(rendered) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦yes<|im_end|>⟧\n"
        "<|im_start|>user\nok<|im_end|>\n<|im_start|>assistant\n⟦no<|im_end|>⟧\n"
    )
    assert [(s.message, s.weight) for s in rendered.spans] == [(1, 1.0), (3, 1.0)]
    assert [m for m, _, _ in rendered.regions] == [0, 1, 2, 3]


def test_m7_a_turn_end_that_is_not_the_eos_is_learned():
    assert learned("gem", chat("a", "b", "c", "d")) == ["b<end_of_turn>", "d<end_of_turn>"]


def test_m8_the_next_role_marker_is_the_stop_where_turns_have_no_end():
    messages = chat("q1", "a1", "q2", "a2")
    rendered = RENDERERS["glm"].render(messages)
    assert show(rendered) == "<|user|>\nq1<|assistant|>\n⟦a1<|user|>⟧\nq2<|assistant|>\n⟦a2⟧"
    assert rendered.turns_without_stop == 1


def test_m8_a_tool_call_stops_at_the_observation_marker():
    messages = [*chat("q", {"role": "assistant", "content": "", "tool_calls": [call({"k": "v"})]})]
    messages += [{"role": "tool", "content": "result"}, {"role": "assistant", "content": "done"}]
    first, last = learned("glm4moe", messages)
    assert first.endswith("</tool_call><|observation|>")
    assert last == "done"


def test_m15_tool_calls_are_learned_and_tool_replies_are_not():
    messages = [*chat("q", {"role": "assistant", "content": "", "tool_calls": [call({"k": "v"})]})]
    messages += [{"role": "tool", "tool_call_id": "c4d5e6f7g", "name": "find", "content": "result"}]
    messages += [{"role": "assistant", "content": "done"}]
    for name in ("qwen3", "gptoss", "deepseekv3", "gemma4_v5", "glm4moe", "qwen3_5_think", "llama3_1"):
        first, last = learned(name, messages, [{"type": "function", "function": {"name": "find", "description": "d"}}])
        assert "find" in first
        assert "v" in first
        assert "result" not in first + last
        assert "done" in last


def test_m13_m14_reasoning_is_learned_where_it_is_rendered_and_an_answer_without_it_is_not():
    first, second = ({"role": "assistant", "content": f"a{i}", "reasoning_content": f"because{i}"} for i in (1, 2))
    rendered = RENDERERS["qwen3"].render(chat("q1", first, "q2", second))
    assert [rendered.text[s.start : s.end] for s in rendered.spans] == ["<think>\nbecause2\n</think>\n\na2<|im_end|>"]
    assert rendered.reasoning_dropped == 1
    assert "because1" not in rendered.text


def test_m12_reasoning_behind_a_lone_closer_is_rendered_once_and_nothing_invented_is_learned():
    messages = chat("q", "sum is 4.</think>The answer is 4.")
    rendered = RENDERERS["qwen3"].render(messages)
    assert rendered.text.count("sum is 4.") == rendered.text.count("</think>") == 1
    assert learned("qwen3", messages) == ["<think>\nsum is 4.\n</think>\n\nThe answer is 4.<|im_end|>"]


def test_m12_a_template_that_puts_an_empty_block_before_the_lone_closer_learns_no_such_block():
    source = toys.CML.replace(
        "+ m['content'] +",
        "+ ('<think>\\n\\n</think>\\n\\n' if m['role'] == 'assistant' else '') + m['content'] +",
    )
    rendered = make_renderer(source, eos="<|im_end|>").render(chat("q", "sum is 4.</think>The answer is 4."))
    assert "assistant\n<think>\n\n</think>\n\n⟦sum" in show(rendered)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("qwen3", {}, "assistant\n<think>\n\n</think>\n\n⟦yes<|im_end|>⟧"),
        ("qwen3", {"enable_thinking": False}, "assistant\n<think>\n\n</think>\n\n⟦yes<|im_end|>⟧"),
        ("qwen3_5_think", {}, "assistant\n<think>\n⟦\n</think>\n\nyes<|im_end|>⟧"),
        ("qwen3_5_think", {"enable_thinking": False}, "assistant\n<think>\n\n</think>\n\n⟦yes<|im_end|>⟧"),
        ("glm4moe", {}, "<|assistant|>\n<think></think>\n⟦yes⟧"),
        ("cohere2", {}, "<|CHATBOT_TOKEN|><|START_RESPONSE|>⟦yes<|END_RESPONSE|><|END_OF_TURN_TOKEN|>⟧"),
        ("phi3", {}, "<|assistant|>\n⟦yes<|end|>⟧\n</s>"),
        ("gptoss", {}, "<|start|>assistant⟦<|channel|>final<|message|>yes<|return|>⟧"),
        ("deepseekv3", {}, "<｜Assistant｜>⟦yes<｜end▁of▁sentence｜>⟧"),
    ],
)
def test_prefills_and_empty_think_blocks_are_prompt(name, options, expected):
    rendered = make_renderer(TEMPLATES[name], template_kwargs=options).render(chat("hi", "yes"))
    assert show(rendered).rstrip("\n").endswith(expected)


def test_gpt_oss_learns_the_second_header_inside_one_message():
    message = {"role": "assistant", "content": "yes", "thinking": "hm"}
    assert learned("gptoss", chat("hi", message)) == [
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes<|return|>"
    ]


def test_gpt_oss_ends_with_end_return_or_call():
    messages = [*chat("q", {"role": "assistant", "content": "", "tool_calls": [call({"k": "v"})]})]
    messages += [{"role": "tool", "content": "r"}, *chat({"role": "assistant", "content": "a"}, "b")]
    messages[-1] = {"role": "user", "content": "u"}
    messages += [{"role": "assistant", "content": "z"}]
    assert [text.rpartition("<|")[2] for text in learned("gptoss", messages)] == ["call|>", "end|>", "return|>"]


@pytest.mark.parametrize(
    "content", ["", " \n\t", "\n\n  x", "b \n \n", "x\x01y", "x\ufdd0y", "<|im_start", "a<|im_end"]
)
def test_odd_contents_are_learned_whole(content):
    assert learned("cml", chat("q", content)) == [content + "<|im_end|>"]


def test_white_space_alone_is_no_header():
    assert learned("gptoss", chat("q", " \n\t")) == ["<|channel|>final<|message|> \n\t<|return|>"]


def test_content_that_ends_like_a_marker_keeps_its_stop():
    for content in ("a>", "a|>", "</think>", "<b>", "</tool_call>", "x<|end|"):
        assert learned("cml", chat("q", content, "r", content)) == [content + "<|im_end|>"] * 2


def test_deepseek_writes_no_header_after_tool_outputs():
    messages = [*chat("q", {"role": "assistant", "content": "", "tool_calls": [call('{"k": 1}')]})]
    messages += [{"role": "tool", "content": "r"}, {"role": "assistant", "content": "a"}]
    text = show(RENDERERS["deepseekv3"].render(messages))
    assert text.endswith("r<｜tool▁output▁end｜><｜tool▁outputs▁end｜>⟦a<｜end▁of▁sentence｜>⟧")


def test_a_template_without_a_generation_prompt_needs_none_where_it_writes_no_header():
    assert learned("headerless", chat("q", "a", "r", "b")) == ["a</s>", "b</s>"]


def test_consecutive_and_leading_assistants_have_their_own_spans():
    first, second = ({"role": "assistant", "content": f"b{i}"} for i in (1, 2))
    assert learned("cml", [{"role": "user", "content": "a"}, first, second]) == ["b1<|im_end|>", "b2<|im_end|>"]
    assert learned("cml", [first, {"role": "user", "content": "a"}, second]) == ["b1<|im_end|>", "b2<|im_end|>"]


def test_a_default_system_message_in_the_first_turn_is_prompt():
    source = (
        "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
        "<|im_start|>system\nBe kind<|im_end|>\n{% endif %}"
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    rendered = make_renderer(source, eos="<|im_end|>").render([{"role": "assistant", "content": "hello"}])
    assert show(rendered).endswith("Be kind<|im_end|>\n<|im_start|>assistant\n⟦hello<|im_end|>⟧\n")


def test_merged_turns_are_refused_and_not_guessed():
    source = (
        "{% for m in messages %}{% if loop.previtem is not defined or loop.previtem.role != m.role %}"
        "{{ '<|im_start|>' + m.role + '\n' }}{% endif %}{{ m.content }}"
        "{% if loop.nextitem is not defined or loop.nextitem.role != m.role %}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    renderer = make_renderer(source, eos="<|im_end|>")
    assert show(renderer.render(chat("a", "b"))).count("⟦") == 1
    with pytest.raises(RowRefused) as refused:
        renderer.render([*chat("a", "b1"), {"role": "assistant", "content": "b2"}])
    assert refused.value.reason is Reason.MASK_UNDERIVABLE


def test_a_prompt_that_depends_on_earlier_turns_is_asked_for_at_each():
    source = (
        "{% set ns = namespace(loud=false) %}{% for m in messages %}"
        "{% if m.role == 'user' %}{% set ns.loud = '/loud' in m.content %}{% endif %}"
        "{{ '<|im_start|>' + m.role + '\n' + ('LOUD: ' if ns.loud and m.role == 'assistant' else '') + m.content }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
        "{% if ns.loud %}{{ 'LOUD: ' }}{% endif %}{% endif %}"
    )
    renderer = make_renderer(source, eos="<|im_end|>")
    rendered = renderer.render(chat("a", "b", "c /loud", "LOUD: d", "e", "LOUD: f"))
    assert [rendered.text[s.start : s.end] for s in rendered.spans] == [
        "b<|im_end|>",
        "LOUD: d<|im_end|>",
        "LOUD: f<|im_end|>",
    ]


def test_a_prompt_written_inside_the_loop_is_known():
    source = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
        "{% if loop.last and add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}{% endfor %}"
    )
    rendered = make_renderer(source, eos="<|im_end|>").render(chat("a", "b"))
    assert show(rendered).endswith("<|im_start|>assistant\n⟦b<|im_end|>⟧\n")


@pytest.mark.parametrize(
    ("head", "asked"),
    [
        ("{% if add_generation_prompt is not defined %}{% set add_generation_prompt = false %}{% endif %}", False),
        ("{% if add_generation_prompt %}{{ 'x' }}{% set add_generation_prompt = false %}{% endif %}", True),
        ("{% if add_generation_prompt %}{% set ns = 1 %}{% set add_generation_prompt = false %}{% endif %}", True),
        ("{% for m in messages %}{% if loop.last and add_generation_prompt %}x{% endif %}{% endfor %}", True),
    ],
)
def test_a_default_for_the_prompt_is_no_question_for_it(head: str, asked: bool):
    """It is what is asked for before the last loop that writes that makes a second render needed at every turn."""
    tree = Environment().parse(head + "{% for m in messages %}{{ m.content }}{% endfor %}{{ 'tail' }}")
    assert _tail_dependence(tree) == (True, asked)


contents = st.text(alphabet="ab \n<>|x", max_size=6)


@given(turns=st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), contents), min_size=1, max_size=6))
def test_chatml_spans_are_what_a_hand_would_mark(turns):
    """The oracle writes the conversation and its marks by string formatting, turn by turn."""
    expected = "".join(
        f"<|im_start|>{role}\n⟦{content}<|im_end|>⟧\n"
        if role == "assistant"
        else f"<|im_start|>{role}\n{content}<|im_end|>\n"
        for role, content in turns
    )
    assert show(RENDERERS["cml"].render([{"role": r, "content": c} for r, c in turns])) == expected


@given(
    name=st.sampled_from(
        ["cml", "gem", "qwen3", "gptoss", "llama3_1", "phi3", "deepseekv3", "headerless", "gemma4_v5"]
    ),
    turns=st.lists(
        st.text(alphabet="abc xyz", min_size=1, max_size=8).map(str.strip).filter(bool), min_size=2, max_size=8
    ),
)
def test_a_span_starts_where_the_prompt_at_that_point_ends(name, turns):
    """Where the prompt of a turn is a prefix of the whole, the span starts exactly behind it, think blocks apart."""
    renderer = RENDERERS[name]
    messages = chat(*turns[: len(turns) // 2 * 2])
    rendered = renderer.render(messages)
    assert [s.message for s in rendered.spans] == list(range(1, len(messages), 2))
    for span in rendered.spans:
        prompt = renderer.plain(messages[: span.message], None, add_generation_prompt=True)
        if rendered.text.startswith(prompt):
            assert rendered.text[len(prompt) : span.start].strip("\n") in ("", "<think>\n\n</think>")
        assert messages[span.message]["content"] in rendered.text[span.start : span.end]


ODD = [
    "",
    "a",
    "b \n",
    "\n<",
    "<think>\n\n</think>\n\nx",
    "<think>r</think>y",
    "</tool_call>",
    "a<|im_end",
    " x>",
    "[THINK][/THINK]z",
]


@st.composite
def conversations(draw):
    messages = [{"role": "user", "content": "q"}]
    for _ in range(draw(st.integers(1, 5))):
        message = {"role": "assistant", "content": draw(st.sampled_from(ODD) | st.text("ab <>\n|[/_", max_size=6))}
        if draw(st.booleans()):
            message["tool_calls"] = [call({"k": "v"}) for _ in range(draw(st.integers(1, 2)))]
        messages.append(message)
        messages.append({"role": draw(st.sampled_from(["user", "tool"])), "content": "r"})
    return messages[: draw(st.integers(2, len(messages)))]


@pytest.mark.parametrize("name", ["cml", "qwen3", "qwen3_5_think", "glm4moe", "gptoss", "llama3_1"])
@settings(max_examples=60, deadline=None)
@given(messages=conversations())
def test_the_short_way_to_a_span_gives_what_the_close_look_gives(name, messages):
    renderer = RENDERERS[name]
    renderer.render(chat("q", "plain", "r", "plain"))  # the stop of a plain turn is what the short way knows
    turns, usual = renderer.turns, renderer.turns.usual

    def compared(a_row, index):
        quick = usual(a_row, index)
        if quick is not None:
            assert [turn[:2] for turn in turns.of(a_row, index, ())] == [quick]
        return quick

    turns.usual = compared
    try:
        renderer.render(messages)
    except RowRefused:
        pass
    finally:
        del turns.usual


TOKENS = st.lists(st.text("a<|> é", min_size=1, max_size=4), min_size=1, max_size=8)


@given(TOKENS, st.text("a<|> é", max_size=8), st.integers(0, 8), st.integers(0, 9))
def test_the_control_token_that_ends_a_text_is_the_longest(tokens: list[str], text: str, start: int, end: int):
    controls = Controls(tokens)
    fitting = [token for token in tokens if token.strip() and text.endswith(token, start, end) and start < end]
    expected = max(fitting, key=len, default=None)
    if end <= len(text):
        assert controls.ending_at(text, start, end) == expected
        part = text[start:end]
        assert controls.ends_plainly(text, start, end) == (not part or not (expected or part[-1].isspace()))
    for token in controls.tokens:
        alone = sum(other.endswith(token) for other in controls.tokens) == 1
        assert controls.is_unambiguous(token) == alone
