"""Tool calls are read from text that arrives in pieces, and forced by a grammar that their parser reads back."""

import json
from typing import Any

import llguidance
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle.testing import tiny_tokenizer
from twinkle_server.chat.errors import InvalidParameter
from twinkle_server.chat.render import ToolFormat
from twinkle_server.chat.tools import ToolReader, build_parser, forced_grammar, strict_grammar

HERMES = ToolFormat("HermesQwenParser", json=True, before="\n", after="\n", special=False)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"],
            "additionalProperties": False,
        },
    },
}  # fmt: skip
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def read(text: str, size: int, form: ToolFormat = HERMES) -> tuple[str, list[tuple[str, Any]]]:
    reader = ToolReader(build_parser(form))
    parts = [reader.add(text[place : place + size]) for place in range(0, len(text), size)]
    parts.append(reader.finish())
    calls = [(call.name, json.loads(call.arguments)) for _, found in parts for call in found]
    return "".join(shown for shown, _ in parts), calls


@given(size=st.integers(1, 90), before=st.sampled_from(["", "I look.\n", "a <tool"]), count=st.integers(1, 2))
def test_text_and_calls_are_told_apart_at_any_cut(size: int, before: str, count: int) -> None:
    shown, calls = read(before + "\n".join([CALL] * count), size)
    assert (shown.strip(), calls) == (before.strip(), [("weather", {"city": "Rome"})] * count)


@given(size=st.integers(1, 40), text=st.sampled_from(["<tool_call>no json</tool_call> x", "a < b", "<tool_call>cut"]))
def test_what_is_no_call_stays_text(size: int, text: str) -> None:
    assert read(text, size) == (text, [])


def test_ids_of_calls_differ() -> None:
    reader = ToolReader(build_parser(HERMES))
    calls = reader.add(CALL + CALL)[1]
    assert len({call.id for call in calls}) == 2


@pytest.fixture(scope="module")
def vocabulary() -> Any:
    tokenizer = tiny_tokenizer().backend_tokenizer
    return llguidance.LLTokenizer(tokenizer.to_str(), eos_token=258)


def accepts(vocabulary: Any, grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(vocabulary, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.consume_tokens(tiny_tokenizer().encode(text)) and matcher.is_accepting())


def test_the_grammar_has_just_the_calls_that_are_allowed(vocabulary: Any) -> None:
    parser = build_parser(HERMES)
    one, several = (forced_grammar(HERMES, parser, [WEATHER], each) for each in (False, True))
    assert accepts(vocabulary, one, CALL)
    assert not accepts(vocabulary, one, f"{CALL}\n{CALL}")
    assert accepts(vocabulary, several, f"{CALL}\n{CALL}")
    assert not accepts(vocabulary, one, CALL.replace("Rome", "Bonn"))
    assert not accepts(vocabulary, one, CALL.replace("weather", "wether"))


def test_strict_calls_match_their_schema_and_text_is_free(vocabulary: Any) -> None:
    grammar = strict_grammar(HERMES, build_parser(HERMES), [WEATHER])
    for text in ("hello < you", CALL, f"I look.\n{CALL}\n{CALL}"):
        assert accepts(vocabulary, grammar, text)
    assert not accepts(vocabulary, grammar, CALL.replace("Rome", "Bonn"))


def test_calls_that_are_no_json_cannot_be_forced() -> None:
    form = ToolFormat("DSMLParser", json=False, before="", after="", special=False)
    with pytest.raises(InvalidParameter, match="cannot be forced"):
        forced_grammar(form, build_parser(form), [WEATHER], several=False)
    with pytest.raises(InvalidParameter, match="cannot be enforced"):
        strict_grammar(form, build_parser(form), [WEATHER])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('Wait.<tool_call>\n{"name": "wea', "Wait."),
        ("<tool_call>", ""),
        ("<tool_call>\n<function=wea", ""),
        ("<tool_call> is a tag", "<tool_call> is a tag"),
        ("a < b", "a < b"),
    ],
)
@pytest.mark.parametrize("size", [1, 90])
def test_the_markup_of_a_call_that_is_cut_is_not_text(text: str, shown: str, size: int) -> None:
    reader = ToolReader(build_parser(HERMES))
    parts = [reader.add(text[place : place + size]) for place in range(0, len(text), size)]
    parts.append(reader.finish(cut=True))
    assert "".join(each for each, _ in parts) == shown
    assert not any(calls for _, calls in parts)
    assert read(text, size)[0] == text, "without a cut it is what the model wanted to write"
