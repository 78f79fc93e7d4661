"""Renders equal transformers' own, with turn marks and shortcuts or without, and marks tell who wrote what."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packsvc.encode import tooltexts
from packsvc.encode.messages import prepare_messages, tools_key
from packsvc.encode.probes import probes
from packsvc.encode.rendered import Decisions
from packsvc.encode.template import _MARKERS, ClockAskedError, TurnTemplate
from packsvc.errors import EncodeError
from tests.encode import toys
from tests.encode.templates import DATE, SPECIAL, by_transformers, chat, trl_templates

TEMPLATES = trl_templates()
QWEN3 = TEMPLATES["qwen3"]
TOYS = {name: getattr(toys, name) for name in ("CML", "BOS_CML", "GEM", "GLM", "THINK", "ALT")}


def turn_template(source: str, **options: Any) -> TurnTemplate:
    return TurnTemplate(source, variables=SPECIAL, date=options.pop("date", DATE))


def outcome(render: Any, *args: Any, **options: Any) -> tuple[str, str]:
    try:
        return "text", render(*args, **options)
    except Exception as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_trl_template_renders_as_in_transformers_with_marks_and_without(name):
    template = turn_template(TEMPLATES[name])
    rendered = 0
    for as_parts in (False, True):
        for probe in probes(as_parts):
            prepared = prepare_messages(probe.messages, Decisions())
            for asks in (False, True):
                expected = outcome(
                    by_transformers, TEMPLATES[name], probe.messages, probe.tools, add_generation_prompt=asks
                )
                assert outcome(template.plain, prepared, probe.tools, add_generation_prompt=asks) == expected
                if expected[0] == "text":
                    marked = template.marked(prepared, probe.tools, add_generation_prompt=asks)
                    assert marked is not None
                    assert marked.text == expected[1]
                    rendered += 1
    assert rendered


strings = st.text(
    st.one_of(
        st.sampled_from("ab \n\t<>/|{}\"'\\éß日\x01\x02\x03\ufdd0\ufdd1\u0000\U0001f600"),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=12,
) | st.sampled_from(
    ["<think>\nr\n</think>\n\na", "x</think>y", "<tool_response>z</tool_response>", "{{ x }}", "/no_think", "", "user"]
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats(allow_nan=False) | strings,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "items", "get", "é"]), inner),
    max_leaves=6,
)
calls = st.builds(
    lambda name, arguments, flat: (
        {"name": name, "arguments": arguments}
        if flat
        else {"id": "c4d5e6f7g", "type": "function", "function": {"name": name, "arguments": arguments}}
    ),
    strings,
    st.dictionaries(strings, json_values, max_size=3) | strings,
    st.booleans(),
)
messages = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "developer", "user", "assistant", "assistant", "tool"]),
            "content": strings,
        },
        optional={
            "reasoning_content": strings,
            "thinking": strings,
            "tool_calls": st.lists(calls, max_size=2),
            "name": strings,
            "tool_call_id": st.just("c4d5e6f7g"),
        },
    ),
    min_size=1,
    max_size=6,
)
schemas = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.just("function"),
            "function": st.fixed_dictionaries(
                {"name": strings, "description": strings},
                optional={
                    "parameters": st.fixed_dictionaries(
                        {"type": st.just("object")},
                        optional={
                            "properties": st.dictionaries(
                                strings,
                                st.fixed_dictionaries(
                                    {"type": st.sampled_from(["string", "integer", "array", "object"])},
                                    optional={
                                        "description": strings,
                                        "default": json_values,
                                        "enum": st.lists(strings),
                                    },
                                ),
                                max_size=2,
                            ),
                            "required": st.lists(strings, max_size=2),
                        },
                    )
                },
            ),
        }
    ),
    max_size=2,
)
SHORT = ("qwen3", "gptoss", "llama3_1", "glm4moe", "gemma4_v5", "deepseekv3", "qwen3_5_think", "lfm2_2_5", "phi3")
PROPERTY_TEMPLATES = {name: TEMPLATES[name] for name in SHORT} | TOYS
_made: dict[str, TurnTemplate] = {}


@settings(max_examples=60)
@given(
    name=st.sampled_from(sorted(PROPERTY_TEMPLATES)), messages=messages, tools=st.none() | schemas, asks=st.booleans()
)
def test_shortcuts_and_marks_change_no_render_and_no_error(name, messages, tools, asks):
    """Any conversation, odd values and all: the text of transformers, or its error word for word."""
    source = PROPERTY_TEMPLATES[name]
    template = _made.setdefault(name, turn_template(source))
    expected = outcome(by_transformers, source, messages, tools, add_generation_prompt=asks)
    prepared = prepare_messages(messages, Decisions())
    assert outcome(template.plain, prepared, tools, add_generation_prompt=asks) == expected
    if expected[0] == "text":
        marked = template.marked(prepared, tools, add_generation_prompt=asks)
        assert marked is not None
        assert marked.text == expected[1]
        assert all(a < b for _, a, b in marked.regions)
        assert all(a[2] <= b[1] for a, b in zip(marked.regions, marked.regions[1:], strict=False))


EXPRESSIONS = """
{{ messages[0].role }}|{{ messages[0].items is defined }}|{{ messages[0]['items'] is defined }}|
{{ messages[0].get('x') }}|{{ messages[0].nope }}|{{ messages[0].nope is defined }}|{{ messages[9] is defined }}|
{{ ns.a }}|{{ ns.missing is defined }}|{{ ns.f('x') }}|{{ messages[0].content.upper() }}|{{ 'a{}'.format('b') }}|
{{ messages[0].content.replace('l', name) }}|{{ ns.d.k }}|{{ ns.d['k'] }}|{{ ns.l.index is defined }}|
{% for k, v in messages[0].items() %}
{{ loop.index }}{{ k }}={{ v }}{{ loop.last }}{{ loop.length }}{{ loop.revindex }}{{ loop.revindex0 }}
{% endfor %}
{% for x in 'abc' %}
{{ loop.first }}{{ loop.index0 }}{{ loop.previtem }}{{ loop.cycle(1, 2) }}{{ loop.nextitem is defined }}
{% endfor %}
{{ 5.real is defined }}{{ messages.index is defined }}{{ messages[0].content.strip is defined }}
{{ messages[0] | tojson }}{{ messages | tojson(indent=2) }}{{ [1, 2.5, none, true, "é<"] | tojson }}
{{ messages[0].content.split('l') | join('-') }}
{{ messages[0]['{0}'] is defined }}{{ messages[0]['}'] }}{{ ns['{x'] is defined }}{{ messages[0]["'"] is defined }}
"""
SETUP = (
    "{% macro f(x) %}[{{ x }}]{% endmacro %}{% set name = 'Q' %}"
    "{% set ns = namespace(a=1, f=f, d={'k': 'v'}, l=[1], s='str') %}"
)


def test_expressions_of_every_shortcut_and_of_their_neighbours():
    source = SETUP + EXPRESSIONS
    messages = [{"role": "user", "content": "hello", "items": 3}]
    assert turn_template(source).plain(messages, None) == by_transformers(source, messages)


EACH, END = "{% for m in messages %}", "{% endfor %}"
PLACE = "{{ [loop.first, loop.last, loop.index, loop.index0, loop.revindex, loop.revindex0, loop.length] }}"
LOOPS = {
    "a list": EACH + PLACE + END,
    "backwards": "{% for m in messages[::-1] %}" + PLACE + END,
    "another loop inside": EACH + "{% for x in [1, 2] %}" + PLACE + END + PLACE + END,
    "a dict": "{% for k in messages[0] %}" + PLACE + END,
    "a generator": "{% for x in messages | map('upper') %}{{ loop.last }}" + END,
    "with a condition": "{% for m in messages if m.role == 'user' %}" + PLACE + "{% else %}none" + END,
    "over an empty list": "{% for m in [] %}" + PLACE + "{% else %}none" + END,
    "over nothing": "{% for m in nothing %}" + PLACE + "{% else %}none" + END,
    "over a number": "{% for m in 5 %}{{ loop.first }}" + END,
    "over a missing key": "{% for m in messages[0].calls %}{{ loop.first }}" + END + "{{ messages[0].calls.first }}",
    "very long": "{% for m in messages * 200 %}" + PLACE + END,
    "what else a loop knows": EACH + "{{ loop.cycle(1, 2) }}{{ loop.changed(m.role) }}{{ loop.previtem }}" + END,
    "handed on": "{% macro f(loop) %}{{ loop.index }}{{ loop.x }}{% endmacro %}"
    + EACH
    + "{{ f(loop) }}{{ f(m) }}"
    + END,
    "a name like it": "{% set loop = {'index': 7} %}{{ loop.index }}" + EACH + "{{ loop.index }}" + END,
    "recursive": "{% for m in [1, [2, [3]]] recursive %}{{ loop.depth }}{{ loop(m) if m is iterable else m }}" + END,
    "unpacked": "{% for k, v in [(1, 2), [3, 4]] %}" + PLACE + "{{ k + v }}" + END,
    "broken off": EACH + "{% if loop.last %}{% break %}{% endif %}{{ loop.index }}{% continue %}x" + END,
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops_know_their_places_as_in_jinja(name):
    messages = [{"role": role, "content": "hello"} for role in ("user", "assistant", "user")]
    assert outcome(turn_template(LOOPS[name]).plain, messages, None) == outcome(by_transformers, LOOPS[name], messages)


@pytest.mark.parametrize(
    "expression",
    [
        "{% set ns = namespace() %}{{ ns.a is defined }}{% set ns.a = 1 %}{{ ns.a }}",
        "{% set ns = namespace({'a': [1]}, b=2) %}{{ ns.a }}{{ ns.a[0] }}{{ ns.b }}",
        "{% set ns = namespace(self=1, x=messages[0].role) %}{{ ns.self }}{{ ns.x }}{{ ns.items is defined }}",
        "{% set ns = namespace(_x=1) %}{{ ns._x }}",
        "{% set ns = namespace(a=1) %}{% set ns._b = 1 %}{{ ns._b }}",
        "{% set namespace = dict %}{% set ns = namespace(a=1) %}{{ ns.a }}",
        "{{ namespace(a=nothing.x) }}",
        "{% set ns = namespace(class=1, none=2) %}{{ ns.class }}{{ ns['class'] is defined }}",
        "{{ nothing(a=1) }}",
    ],
)
def test_namespaces_are_as_in_transformers(expression):
    messages = [{"role": "user", "content": "hello"}]
    assert outcome(turn_template(expression).plain, messages, None) == outcome(by_transformers, expression, messages)


@pytest.mark.parametrize("name", ["none", "string", "defined", "undefined", "true", "false", "mapping", "iterable"])
def test_tests_answer_as_in_jinja(name):
    values = "none, true, false, 0, 1, '', 'a', [], {}, messages, messages[0].nope, messages[0].role, nothing, 1.5"
    source = "{{ [" + ", ".join(f"{v} is {name}, {v} is not {name}" for v in values.split(", ")) + "] }}"
    messages = [{"role": "user", "content": "hello"}]
    found = turn_template(source).plain(messages, None)
    assert found == by_transformers(source, messages)
    assert "True" in found
    assert "False" in found


@pytest.mark.parametrize(
    "expression",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(x=1) }}",
        "{{ messages[0].pop('role') }}",
        "{{ ns.__class__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{% set m = 'a{0.__class__}'.format %}{{ m(messages) }}",
        "{% set ns.x = '{0.__class__}'.format %}{{ ns.x(messages) }}",
        "{{ messages[0].get.__self__ }}",
        "{{ messages[0]['__class__'] }}",
        "{{ loop.x }}",
        "{% for m in messages %}{{ loop.__class__ }}{% endfor %}",
        "{{ raise_exception('no') }}",
        "{{ nothing.x }}",
        "{{ nothing.strip() }}",
        "{{ messages[0].content.nope() }}",
    ],
)
def test_the_sandbox_stays_a_sandbox(expression):
    source = SETUP + expression
    messages = [{"role": "user", "content": "hello"}]
    expected = outcome(by_transformers, source, messages)
    assert outcome(turn_template(source).plain, messages, None) == expected
    assert "<class" not in expected[1]


# ---------------------------------------------------------------- marks


def owners(source: str, messages: list[Any]) -> list[tuple[int, str]]:
    marked = turn_template(source).marked(messages, None)
    assert marked is not None
    assert marked.text == by_transformers(source, messages)
    return [(i, marked.text[a:b]) for i, a, b in marked.regions]


def test_every_character_of_a_loop_belongs_to_its_message():
    assert owners("head{% for m in messages %}<{{ m.content }}>{% endfor %}tail", chat("a", "b")) == [
        (0, "<a>"),
        (1, "<b>"),
    ]


def test_continue_break_and_else_leave_no_mark_open():
    source = (
        "{% for m in messages %}{% if m.content == 'b' %}b!{% continue %}{% endif %}{{ m.content }}"
        "{% if m.content == 'c' %}{% break %}{% endif %};{% endfor %}tail"
    )
    assert owners(source, chat("a", "b", "c", "d")) == [(0, "a;"), (1, "b!"), (2, "c")]


def test_a_message_named_inside_anothers_turn_owns_what_follows():
    source = (
        "{% for m in messages %}{% if m.role != 'tool' %}<{{ m.content }}"
        "{% for k in range(loop.index0 + 1, messages | length) %}{% set follow = messages[k] %}"
        "{% if follow.role == 'tool' %}[{{ follow.content }}]{% endif %}{% endfor %}>{% endif %}{% endfor %}"
    )
    messages = [{"role": "assistant", "content": "a"}, {"role": "tool", "content": "t"}]
    assert owners(source, messages) == [(0, "<a"), (1, "[t]"), (0, ">")]


def test_equal_messages_are_told_apart():
    same = {"role": "user", "content": "x"}
    template = turn_template(toys.CML)
    marked = template.marked(prepare_messages([same, same, same], Decisions()), None)
    assert marked is not None
    assert [m for m, _, _ in marked.regions] == [0, 1, 2]


@pytest.mark.parametrize("text", ["\x01", "\x010\x01", "\x011\x01 \x02 \x03", "\x01\x01", "\x01\x02\x03\ufdd00\ufdd0"])
def test_text_that_holds_what_marks_are_made_of_is_rendered_and_owned_right(text):
    assert owners("{% for m in messages %}{{ m.content }};{% endfor %}", chat(text, "b")) == [
        (0, text + ";"),
        (1, "b;"),
    ]


def test_text_that_holds_all_markers_is_not_misread():
    text = "".join(_MARKERS)
    assert turn_template(toys.CML).marked(chat(text), None) is None


@pytest.mark.parametrize(
    ("change", "owned"),
    [("trim", None), ("upper", [(0, " A "), (1, " B ")]), ("length", None), ("replace('\x01', '')", None)],
)
def test_text_that_is_changed_after_it_is_captured_is_compared_with_the_plain_render(change, owned):
    source = "{% set all %}{% for m in messages %} {{ m.content }} {% endfor %}{% endset %}{{ all | CHANGE }}"
    source = source.replace("CHANGE", change)
    marked = turn_template(source).marked(chat("a", "b"), None)
    if owned is None:
        assert marked is None
    else:
        assert marked is not None
        assert [(i, marked.text[a:b]) for i, a, b in marked.regions] == owned


def test_captured_text_written_as_it_is_keeps_its_owners():
    source = "{% set all %}{% for m in messages %}<{{ m.content }}>{% endfor %}{% endset %}{{ all }}"
    assert owners(source, chat("a", "b")) == [(0, "<a>"), (1, "<b>")]


def test_generation_tags_parse_and_keep_owners():
    source = "{% for m in messages %}{% generation %}<{{ m.content }}>{% endgeneration %}{% endfor %}"
    assert owners(source, chat("a", "b")) == [(0, "<a>"), (1, "<b>")]


# ---------------------------------------------------------------- tools


def test_equal_tools_are_rendered_once_and_different_ones_are_not_confused():
    tools = [
        [
            {
                "type": "function",
                "function": {"name": "f", "description": "d", "parameters": {"properties": {"x": value}}},
            }
        ]
        for value in ({"default": 1}, {"default": 1.0}, {"default": True}, {"default": "1"}, {"default": None}, {})
    ]
    tools += [
        [{"b": 1, "a": 2}],
        [{"a": 2, "b": 1}],
        [{"a": [1]}],
        [{"a": [[1]]}],
        [{"a": float("nan")}],
        [{"a": None}],
    ]
    for source in (QWEN3, TEMPLATES["glm4moe"], TEMPLATES["qwen2_5"]):
        template = turn_template(source)
        for _ in range(2):
            for tool_list in [*tools, *json.loads(json.dumps(tools))]:
                got = template.marked(chat("a", "b"), tool_list)
                assert got is not None
                assert got.text == by_transformers(source, chat("a", "b"), tool_list)
    assert len({tools_key(t) for t in tools}) == len(tools)


def test_repeated_tools_are_not_rendered_again(monkeypatch):
    kept: list[str] = []
    keep = tooltexts.ToolTexts.keep
    monkeypatch.setattr(tooltexts.ToolTexts, "keep", lambda self, *args: kept.append(args[0]) or keep(self, *args))
    template = turn_template(QWEN3)
    for text in ("a", "b", "c"):
        assert '{"name": "f"}' in template.plain(chat(text), [{"name": "f"}])
    assert kept == ['\n{"name": "f"}']


def test_statements_that_read_more_than_the_tools_are_rendered_each_time():
    source = (
        "{% set ns = namespace(n=0) %}{% for m in messages %}"
        "{% for t in tools %}{{ t.name }}{{ m.content }}{% endfor %}"
        "{% set ns.n = ns.n + 1 %}{% for t in tools %}{{ ns.n }}{{ loop.index }}{% endfor %}{% endfor %}"
    )
    template = turn_template(source)
    for turns in (("a", "b"), ("c", "d"), ("e",)):
        assert template.plain(chat(*turns), [{"name": "f"}]) == by_transformers(source, chat(*turns), [{"name": "f"}])


# ---------------------------------------------------------------- the clock


def test_t5_a_template_that_asks_for_today_without_a_date_stops_the_job():
    with pytest.raises(ClockAskedError, match="date: YYYY-MM-DD"):
        turn_template(TEMPLATES["gptoss"], date=None).plain(chat("a", "b"), None)
    assert issubclass(ClockAskedError, EncodeError)


def test_t5_with_a_date_templates_see_that_day_every_day():
    assert "Current date: 2026-01-01" in turn_template(TEMPLATES["gptoss"]).plain(chat("a", "b"), None)
    assert "Today Date: 01 Jan 2026" in turn_template(TEMPLATES["llama3_1"]).plain(chat("a", "b"), None)


def test_a_date_string_of_the_job_stays():
    template = TurnTemplate(TEMPLATES["llama3_1"], variables=SPECIAL | {"date_string": "yesterday"}, date=DATE)
    assert "Today Date: yesterday" in template.plain(chat("a", "b"), None)


def test_a_template_that_is_no_jinja_is_an_encode_error_with_its_line():
    with pytest.raises(EncodeError, match="line 2"):
        turn_template("{{ a }}\n{% for %}")
