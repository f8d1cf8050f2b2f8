"""Sampled tokens join their prompt as trained targets, token for token."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twinkle.errors import DataError, Unsupported
from twinkle.template import Template
from twinkle.testing import tiny_tokenizer
from twinkle.tool_parser import ToolCallParser
from twinkle_chat import template as template_module

TEMPLATE = Template(tokenizer=tiny_tokenizer())
END = TEMPLATE.tokenizer.eos_token_id
ROW = {"messages": [{"role": "user", "content": "hé"}], "user_data": [("id", "1")]}
PROMPT: Any = TEMPLATE.encode(ROW, add_generation_prompt=True)
TOKENS = st.lists(st.integers(0, 258), min_size=1, max_size=12)


@pytest.mark.full
@given(first=TOKENS, second=TOKENS)
def test_each_sampled_token_is_the_target_of_the_position_before_it(first: list[int], second: list[int]) -> None:
    once: Any = TEMPLATE.concat_input_feature(PROMPT, first)
    twice: Any = TEMPLATE.concat_input_feature(once, second)
    for feature, tokens in ((once, first), (twice, [*first, *second])):
        ids = PROMPT["input_ids"] + tokens
        assert feature["input_ids"] == ids
        expected = [-100] * len(ids)
        for place in range(PROMPT["length"], len(ids)):
            expected[place - 1] = ids[place]
        assert feature["labels"] == expected
        assert feature["completion_mask"] == [int(label != -100) for label in expected]
        assert feature["attention_mask"] == [1] * len(ids)
        assert feature["position_ids"] == list(range(len(ids)))
        assert feature["length"] == len(ids)


def test_trained_turns_before_stay_trained() -> None:
    messages = [*ROW["messages"], {"role": "assistant", "content": "old"}]
    row: Any = TEMPLATE.encode({"messages": messages})
    joined: Any = TEMPLATE.concat_input_feature(row, [65, END])
    assert joined["labels"] == [*row["labels"][:-1], 65, END, -100]
    assert sum(joined["completion_mask"]) == 2


def test_the_answer_is_appended_to_the_messages_and_the_prompt_is_left_alone() -> None:
    tokens = TEMPLATE.tokenizer("<think>a</think> ok 😀<|im_end|>")["input_ids"]
    joined: Any = TEMPLATE.concat_input_feature(PROMPT, tokens)
    assert joined["messages"] == [*ROW["messages"], {"role": "assistant", "content": "<think>a</think> ok 😀"}]
    assert joined["user_data"] == ROW["user_data"]
    assert len(ROW["messages"]) == 1
    assert "completion_mask" not in PROMPT
    assert "messages" not in TEMPLATE.concat_input_feature({"input_ids": [1]}, [2])


def test_arrays_and_tensors_are_read_as_lists() -> None:
    tensors = {"input_ids": torch.tensor([1, 2]), "labels": np.array([-100, -100]), "position_ids": torch.arange(2)}
    assert TEMPLATE.concat_input_feature(tensors, torch.tensor([3])) == {
        "input_ids": [1, 2, 3],
        "labels": [-100, 3, -100],
        "completion_mask": [0, 1, 0],
        "attention_mask": [1, 1, 1],
        "position_ids": [0, 1, 2],
        "length": 3,
    }


def test_weights_grow_with_the_row() -> None:
    joined: Any = TEMPLATE.concat_input_feature({"input_ids": [1, 2], "loss_scale": [0.5, 0.0]}, [3, 4])
    assert joined["loss_scale"] == [0.5, 1.0, 1.0, 0.0]


def test_no_tokens_change_nothing() -> None:
    joined: Any = TEMPLATE.concat_input_feature(PROMPT, [])
    assert joined["input_ids"] == PROMPT["input_ids"]
    assert joined["labels"] == PROMPT["labels"]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ({}, "no tokens"),
        ({"input_ids": []}, "no tokens"),
        ({"input_ids": [[1, 2]]}, "input_ids of the prompt is a batch"),
        ({"input_ids": [1, 2], "labels": [1]}, "labels of the prompt has 1 values for 2 tokens"),
    ],
)
def test_a_prompt_that_is_no_row_is_refused(prompt: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        TEMPLATE.concat_input_feature(prompt, [1])


def test_split_rows_have_no_continuation() -> None:
    with pytest.raises(Unsupported, match="split"):
        Template(tokenizer=TEMPLATE.tokenizer, truncation_strategy="split").concat_input_feature(PROMPT, [1])


class Brackets(ToolCallParser):
    name, open_marker, close_marker = "brackets", "[[", "]]"

    def detect(self, text: str) -> bool:
        return "[[" in text

    def parse(self, text: str) -> list[Any]:
        name = text.partition("[[")[2].partition("]]")[0]
        return [{"id": "call_0", "type": "function", "function": {"name": name, "arguments": "{}"}}] if name else []

    def clean(self, text: str) -> str:
        return text.partition("[[")[0].strip()


def test_tool_calls_are_read_by_the_parser_that_knows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "detect_first", lambda text: Brackets() if "[[" in text else None)
    joined: Any = TEMPLATE.concat_input_feature(PROMPT, TEMPLATE.tokenizer("look: [[weather]]<|im_end|>")["input_ids"])
    call = {"id": "call_0", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    assert joined["messages"][-1] == {"role": "assistant", "content": "look:", "tool_calls": [call]}
    assert TEMPLATE.parse_tool_call("a [[f]]") == [call | {"function": {"name": "f", "arguments": "{}"}}]
    assert TEMPLATE.clean_tool_call("a [[f]]") == "a"
    assert TEMPLATE.concat_input_feature(PROMPT, TEMPLATE.tokenizer("[[]]")["input_ids"])["messages"][-1] == {
        "role": "assistant",
        "content": "[[]]",
    }


def test_without_a_parser_that_knows_the_text_there_are_no_calls() -> None:
    assert TEMPLATE.parse_tool_call("just text") == []
    assert TEMPLATE.clean_tool_call("just text") == "just text"


def test_a_subclass_reads_the_calls_of_its_own_format() -> None:
    class Own(Template):
        def parse_tool_call(self, decoded: str) -> list[Any]:
            return [{"function": {"name": "add", "arguments": {"a": 1}}}] if "CALL" in decoded else []

        def clean_tool_call(self, decoded: str) -> str:
            return decoded.replace("CALL", "").strip()

    template = Own(tokenizer=TEMPLATE.tokenizer)
    joined: Any = template.concat_input_feature(PROMPT, TEMPLATE.tokenizer("so CALL<|im_end|>")["input_ids"])
    calls = [{"function": {"name": "add", "arguments": {"a": 1}}}]
    assert joined["messages"][-1] == {"role": "assistant", "content": "so", "tool_calls": calls}
