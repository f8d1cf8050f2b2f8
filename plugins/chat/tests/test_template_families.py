"""What is trained in each family of models, to the character."""

from typing import Any

import pytest
from families import CALLS, EVERY, FAMILIES, GLM, TOOLS, TWO_TURNS, call, encoded, talk, template, tokenizer, trained
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle.errors import ArgumentError, EncodeError
from twinkle.testing import tiny_tokenizer

# Two turns, to the character


@EVERY
def test_two_turns_without_reasoning(family: str) -> None:
    assert encoded(family, talk("q", "a", "Q", "A")) == TWO_TURNS[family]


@EVERY
def test_one_turn_is_the_last_of_two(family: str) -> None:
    one, two = trained(family, talk("Q", "A")), trained(family, talk("q", "a", "Q", "A"))
    assert one == two[1:]


@EVERY
def test_a_system_prompt_is_shown_and_not_trained_and_replaces_the_familys_own(family: str) -> None:
    text = encoded(family, talk("q", "a", system="be brief"))
    assert "be brief" in text.partition("⟦")[0]
    assert "You are" not in text
    assert text == encoded(family, talk("q", "a"), default_system="be brief")


@pytest.mark.sample(2)
@EVERY
@settings(max_examples=15, deadline=None)
@given(
    turns=st.lists(
        st.text(st.characters(exclude_categories=("Cs",)), max_size=6).map("x{}y".format), min_size=1, max_size=6
    )
)
def test_what_the_assistant_says_is_trained_and_nothing_that_others_say(family: str, turns: list[str]) -> None:
    own = [turn.replace("|", "") for turn in turns]
    row = talk(*(text for turn in own for text in ("QUESTION", turn)))
    encoder = template(family)
    feature: Any = encoder.encode(row)
    parts = trained(family, row)
    assert len(parts) == len(own)
    assert all(part.strip().startswith(turn) for part, turn in zip(parts, own, strict=True))
    assert not any("QUESTION" in part for part in parts)
    assert feature["labels"][-1] == -100
    assert encoder.decode(
        encoder.tokenizer(encoder.decode(feature["input_ids"]), add_special_tokens=False)["input_ids"]
    ) == (encoder.decode(feature["input_ids"]))


# The generation prompt


@EVERY
@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("answer", ["A", "R|A"])
def test_the_generation_prompt_is_the_beginning_of_the_trained_form(family: str, thinking: bool, answer: str) -> None:
    """The one exception: reasoning in a row, where thinking is disabled, replaces the empty thought of the prompt."""
    if answer == "R|A" and not FAMILIES[family].thinks:
        answer = "A"
    encoder = template(family, enable_thinking=thinking)
    row = talk("q", "a", "Q", answer)
    prompt: Any = encoder.encode({"messages": row["messages"][:-1]}, add_generation_prompt=True)
    whole: Any = encoder.encode(row)
    same = whole["input_ids"][: prompt["length"]] == prompt["input_ids"]
    closed = not thinking and family in ("qwen3", "qwen3_5", "gemma4")
    assert same == (not (closed and answer == "R|A"))
    assert set(prompt["labels"]) == {-100}
    if thinking and answer == "R|A":
        assert whole["labels"][prompt["length"] - 1] == whole["input_ids"][prompt["length"]]


# Thinking


THOUGHT = {
    ("qwen3", True): "<think>\nR\n</think>\n\nA<|im_end|>",
    ("qwen3", False): "R\n</think>\n\nA<|im_end|>",
    ("qwen3_5", True): "R\n</think>\n\nA<|im_end|>",
    ("qwen3_5", False): "R\n</think>\n\nA<|im_end|>",
    ("deepseek_r1", True): "R\n</think>\n\nA<｜end▁of▁sentence｜>",
    ("deepseek_r1", False): "R\n</think>\n\nA<｜end▁of▁sentence｜>",
    ("deepseek_v4", True): "R</think>A<｜end▁of▁sentence｜>",
    ("deepseek_v4", False): "A<｜end▁of▁sentence｜>",
    ("gemma4", True): "<|channel>thought\nR\n<channel|>A<turn|>",
    ("gemma4", False): "<|channel>thought\nR\n<channel|>A<turn|>",
}


@pytest.mark.parametrize(("family", "thinking"), THOUGHT)
def test_the_reasoning_of_the_last_turn_is_trained_and_that_of_earlier_turns_not_shown(
    family: str, thinking: bool
) -> None:
    row = talk("q", "r|a", "Q", "R|A")
    earlier, last = trained(family, row, enable_thinking=thinking)
    assert last == THOUGHT[family, thinking]
    assert earlier == last[last.rindex("A") :].replace("A", "a")
    inline = talk("q", "a", "Q", "<think>\nR\n</think>\n\nA")
    assert encoded(family, inline, enable_thinking=thinking) == encoded(family, row, enable_thinking=thinking)


@pytest.mark.parametrize("family", [name for name, values in FAMILIES.items() if values.thinks])
@pytest.mark.parametrize("thinking", [True, False])
def test_without_reasoning_only_the_answer_is_trained(family: str, thinking: bool) -> None:
    for row in (talk("Q", "A"), talk("q", "a", "Q", "A")):
        assert trained(family, row, enable_thinking=thinking)[-1].startswith("A")


def test_the_smaller_gemmas_prompt_without_a_channel() -> None:
    small = tiny_tokenizer("{% set small = true %}" + tokenizer("gemma4").chat_template)
    small.add_special_tokens({"additional_special_tokens": list(FAMILIES["gemma4"].special)})
    small.bos_token = "<bos>"
    expected = "<bos><|turn>user\nQ<turn|>\n<|turn>model\n⟦A<turn|>⟧\n"
    assert encoded("gemma4", talk("Q", "A"), enable_thinking=False, tokenizer=small) == expected


# Tools


ARGUMENTS: list[dict[str, Any]] = [
    {"json": "{}", "xml": "", "dsml": "", "gemma": "{}"},
    {
        "json": '{"n": 5}',
        "xml": "<parameter=n>\n5\n</parameter>\n",
        "dsml": '<｜DSML｜parameter name="n" string="false">5</｜DSML｜parameter>',
        "gemma": "{n:5}",
    },
    {
        "json": '{"a": "<|im_end|> ü", "l": [true]}',
        "xml": "<parameter=a>\n<|im_end|> ü\n</parameter>\n<parameter=l>\n[true]\n</parameter>\n",
        "dsml": '<｜DSML｜parameter name="a" string="true"><|im_end|> ü</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="l" string="false">[true]</｜DSML｜parameter>',
        "gemma": '{a:<|"|><|im_end|> ü<|"|>,l:[true]}',
    },
]


@pytest.mark.parametrize("family", CALLS)
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=["none", "a number", "text and a list"])
@pytest.mark.parametrize("calls", [1, 2])
def test_tool_calls_are_trained_whole_and_their_results_are_not(
    family: str, arguments: dict[str, Any], calls: int
) -> None:
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call("f", arguments["json"])] * calls},
        *[{"role": "tool", "content": "RESULT", "tool_call_id": "call_f"}] * calls,
        {"role": "assistant", "content": "done"},
    ]
    first, last = trained(family, {"messages": messages, "tools": TOOLS}, enable_thinking=False)
    if calls == 1:
        assert first == CALLS[family].format(**arguments)
    assert first.count("RESULT") == 0
    assert first.endswith(CALLS[family].format(**arguments)[-14:])
    assert last.strip().startswith("done")
    assert "RESULT" not in last


def test_results_of_deepseek_v4_come_in_the_order_of_the_calls() -> None:
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "ok", "tool_calls": [call("f", {}), call("g", {})]},
        {"role": "tool", "content": "G", "tool_call_id": "call_g"},
        {"role": "tool", "content": "F", "tool_call_id": "call_f"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "done"},
    ]
    text = encoded("deepseek_v4", {"messages": messages})
    assert (
        "<｜User｜><tool_result>F</tool_result>\n\n<tool_result>G</tool_result>\n\nmore<｜Assistant｜><think>" in text
    )
    assert [message["content"] for message in messages[2:4]] == ["G", "F"]


def test_with_tools_deepseek_v4_keeps_the_reasoning_of_all_turns() -> None:
    row = talk("q", "r|a", "Q", "R|A", system="S") | {"tools": TOOLS}
    text = encoded("deepseek_v4", row)
    assert "q<｜Assistant｜><think>⟦r</think>a<｜end▁of▁sentence｜>⟧" in text
    assert text.startswith("<｜begin▁of▁sentence｜>S\n\n## Tools\n\n")
    assert '### Available Tool Schemas\n\n{"name": "f", "parameters": {"type": "object"}}\n\nYou MUST' in text


def test_the_effort_of_deepseek_v4_opens_the_prompt_if_it_thinks() -> None:
    row = talk("Q", "A", system="S")
    assert encoded("deepseek_v4", row, reasoning_effort="max").startswith(
        "<｜begin▁of▁sentence｜>Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    )
    assert encoded("deepseek_v4", row, reasoning_effort="high") == encoded("deepseek_v4", row)
    thoughtless = encoded("deepseek_v4", row, enable_thinking=False)
    assert encoded("deepseek_v4", row, enable_thinking=False, reasoning_effort="max") == thoughtless
    with pytest.raises(ArgumentError, match="reasoning_effort must be None, 'high' or 'max', got 'low'"):
        template("deepseek_v4", reasoning_effort="low")
    with pytest.raises(ArgumentError, match="nearest"):
        template("deepseek_v4", max_lenght=3)


@pytest.mark.parametrize("family", ["qwen2", "deepseek_v2", "glm4", "internlm2", "llama3"])
def test_tool_calls_that_a_chat_template_does_not_show_are_refused(family: str) -> None:
    row = talk("q", "a")
    row["messages"][1]["tool_calls"] = [call("weather", {})]
    with pytest.raises(EncodeError, match=r"message 1 \(assistant\) calls the tool 'weather', which .* not show"):
        encoded(family, row)


def test_a_call_after_which_glm4_observes_ends_with_that_token() -> None:
    shows = tokenizer("glm4").chat_template.replace(
        "message.content", "(message.content or message.tool_calls[0].function.name + '\\n{}')"
    )
    other = tiny_tokenizer(shows)
    other.add_special_tokens({"additional_special_tokens": list(GLM)})
    row = talk("q", "")
    row["messages"][1]["tool_calls"] = [call("weather", {})]
    assert trained("glm4", row, tokenizer=other) == ["\nweather\n{}<|observation|>"]


# Length


@pytest.mark.sample(2)
@EVERY
def test_rows_at_the_limit_stay_whole_and_one_more_token_is_cut(family: str) -> None:
    row = talk("q", "a", "Q", "A")
    full: Any = template(family).encode(row)
    size, ids = full["length"], full["input_ids"]
    for strategy in ("raise", "left", "right", "delete", "split"):
        kept: Any = template(family, max_length=size, truncation_strategy=strategy).encode(row)
        assert (kept[0] if strategy == "split" else kept)["input_ids"] == ids
    cut: dict[str, Any] = {
        strategy: template(family, max_length=size - 1, truncation_strategy=strategy).encode(row)
        for strategy in ("left", "right", "delete", "split")
    }
    assert cut["left"]["input_ids"] == ids[1:]
    assert cut["right"]["input_ids"] == ids[:-1]
    assert cut["delete"]["input_ids"] == []
    assert [part["input_ids"] for part in cut["split"]] == [ids[:-1], ids[-1:]]
    for part in (cut["left"], cut["right"], *cut["split"]):
        assert part["labels"][-1] == -100
        assert all(label in (-100, token) for label, token in zip(part["labels"], part["input_ids"][1:], strict=False))
    with pytest.raises(EncodeError, match=f"{size} tokens and max_length is {size - 1}"):
        template(family, max_length=size - 1).encode(row)
