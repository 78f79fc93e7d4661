"""Values are what was written, or the text is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packsvc.sources.parsing import NotJson, parse_json, parse_json_slowly

VALUES: Any = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
).filter(lambda value: "\\ud" not in json.dumps(value) or _encodable(value))


def _encodable(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def strict(value: Any) -> str:
    """Tells 1 from 1.0 and from true, and one order of keys from another."""
    return repr(value)


@given(value=VALUES, ascii=st.booleans())
def test_the_fast_parser_gives_what_the_standard_library_gives(value: Any, ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii).encode()
    assert strict(parse_json(text)) == strict(json.loads(text)) == strict(parse_json_slowly(text))


@given(data=st.binary(max_size=20) | st.text('[]{}:,"0123456789eE+-.\\untrfalsNI \t', max_size=20).map(str.encode))
def test_both_parsers_refuse_the_same_texts(data: bytes) -> None:
    results = []
    for parse in (parse_json, parse_json_slowly):
        try:
            results.append(strict(parse(data)))
        except NotJson:
            results.append("refused")
    assert results[0] == results[1]


@pytest.mark.parametrize(
    "text", ["123456789012345678901234567890", "-9223372036854775809", "18446744073709551616", "1" * 400]
)
def test_integers_beyond_64_bits_keep_their_value(text: str) -> None:
    assert parse_json(f'{{"n": {text}}}'.encode()) == {"n": int(text)}


@pytest.mark.parametrize(
    "text",
    [b"NaN", b"[Infinity]", b"-Infinity", b"1e400", b'"\\ud800"', b'{"\\udfff": 1}', b"\xff", b'"\xed\xa0\x80"', b"",
     b"01", b"{'a': 1}", b'"a\nb"', b"[1,]", b"1 2", b"9" * 5000],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused(text: bytes) -> None:
    with pytest.raises(NotJson):
        parse_json(text)


@pytest.mark.parametrize("depth", [1_100, 100_000])
def test_deep_nesting_is_refused(depth: int) -> None:
    with pytest.raises(NotJson, match="nested too deeply"):
        parse_json(b"[" * depth + b"]" * depth)


def test_keys_keep_their_order_and_the_last_of_two_wins() -> None:
    assert list(parse_json(b'{"z": 1, "a": 2, "z": 3}').items()) == [("z", 3), ("a", 2)]


def test_escaped_pairs_of_surrogates_are_one_character() -> None:
    assert parse_json(b'"\\ud83d\\ude00"') == "\U0001f600"
