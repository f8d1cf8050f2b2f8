"""ShareGPT's conversations, with tools, in their several dialects."""

from typing import Any

import pytest

from twinkle.dataset import Dataset, DatasetMeta
from twinkle.errors import DataError
from twinkle.preprocessor import ShareGPTProcessor
from twinkle_chat.messages import plain_messages


def turn(speaker: str, text: Any, **more: Any) -> dict[str, Any]:
    return {"from": speaker, "value": text, **more}


def test_speakers_become_roles() -> None:
    names = ["system", "human", "gpt", "user", "assistant", "Human", " GPT "]
    [messages] = ShareGPTProcessor()({"conversations": [[turn(name, name) for name in names]]})["messages"]
    assert [message["role"] for message in messages] == [
        "system", "user", "assistant", "user", "assistant", "user", "assistant",
    ]  # fmt: skip
    assert [message["content"] for message in messages] == names


@pytest.mark.parametrize("key", ["conversations", "conversation", "messages"])
def test_the_usual_columns_are_found(key: str) -> None:
    turns = [turn("human", "a"), {"role": "assistant", "content": "b", "weight": 0, "loss": None}]
    assert ShareGPTProcessor()({key: [turns], "id": [1]}) == {
        "messages": [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]]
    }


def test_any_column_can_be_named() -> None:
    assert ShareGPTProcessor("talk")({"talk": [[turn("human", "a")]], "messages": [3]})["messages"] == [
        [{"role": "user", "content": "a"}]
    ]


def test_a_system_message_comes_from_the_row_or_the_argument() -> None:
    turns = [turn("human", "a"), turn("gpt", "b")]
    columns = {"conversations": [turns, turns, [turn("system", "own"), *turns]], "system": ["row", None, "row"]}
    made = ShareGPTProcessor(system="argument")(columns)["messages"]
    assert [messages[0]["content"] for messages in made] == ["row", "argument", "own"]
    assert [len(messages) for messages in made] == [3, 3, 3]


def test_function_calls_become_tool_calls() -> None:
    call = '{"name": "weather", "arguments": {"city": "Bern"}}'
    turns = [turn("human", "?"), turn("function_call", call), turn("observation", "sunny"), turn("gpt", "Sunny.")]
    tools = '[{"name": "weather", "parameters": {"type": "object"}}]'
    data = Dataset(DatasetMeta(data=[{"conversations": turns, "tools": tools}, {"conversations": turns[:1]}]))
    data.map("ShareGPTProcessor")
    row = data[0]
    assert row["messages"][1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}],
    }
    assert row["messages"][2] == {"role": "tool", "content": "sunny"}
    assert row["tools"] == [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    assert len(plain_messages(row)) == 4
    given = turn("function_call", None, tool_calls=row["messages"][1]["tool_calls"])
    assert ShareGPTProcessor()({"conversations": [[given]]})["messages"] == [[row["messages"][1]]]
    several = turn("tool_call", f"[{call}, {call}]")
    assert len(ShareGPTProcessor()({"conversations": [[several]]})["messages"][0][0]["tool_calls"]) == 2


def test_tools_in_openai_form_stay() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    columns = {"conversations": [[turn("human", "a")]] * 3, "tools": [tools, "", None]}
    assert ShareGPTProcessor()(columns)["tools"] == [tools, None, None]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"text": ["a"]}, "ShareGPTProcessor needs the column 'conversations'; there are: text"),
        ({"conversations": ["a"]}, "row 0 of the batch: column 'conversations' is 'a'; it is a list of turns"),
        ({"conversations": [[]]}, "column 'conversations' is a list"),
        ({"conversations": [[turn("human", "a")], ["b"]]}, "row 1 of the batch, turn 0 is 'b'"),
        ({"conversations": [[turn("humna", "a")]]}, r"turn 0 is from 'humna' \(nearest: 'human'\); known are system"),
        ({"conversations": [[{"value": "a"}]]}, "does not say who speaks; its keys are value, and 'from' is needed"),
        ({"conversations": [[{"from": "gpt"}]]}, "turn 0 has no value; its keys are from"),
        ({"conversations": [[turn("function_call", "{")]]}, "turn 0 holds no JSON"),
        ({"conversations": [[turn("function_call", "{}")]]}, "turn 0 calls '{}'; it is JSON"),
        ({"conversations": [[turn("human", "a")]], "tools": ["{"]}, "column 'tools' holds no JSON"),
        (
            {"conversations": [[turn("human", "a")]], "tools": ['{"a": 1}']},
            "column 'tools' is .*; it is a list of tools",
        ),
    ],
)
def test_what_is_no_conversation_is_named(columns: dict[str, list[Any]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        ShareGPTProcessor()(columns)
