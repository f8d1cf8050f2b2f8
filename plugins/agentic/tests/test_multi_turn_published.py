"""Rollouts in published forms: templates that are not ours, and samplers without log-probabilities."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from twinkle.data_format import SampledSequence, SampleResponse
from twinkle.errors import ArgumentError, DataError
from twinkle.template import Template
from twinkle.testing import tiny_tokenizer
from twinkle_agentic.examples import ScriptedSampler
from twinkle_agentic.rollout import MultiTurnRollout, extend_with_bridge
from twinkle_agentic.tools import CalculatorTool, ToolManager

TEMPLATE = Template(tokenizer=tiny_tokenizer())
SUM = '<tool_call>{"name": "calculator", "arguments": {"expression": "2 + 3"}}</tool_call>'
ASKED: list[Any] = [{"messages": [{"role": "user", "content": "2 + 3?"}], "user_data": [("ground_truth", "5")]}]


class Duck:
    """A template with the three methods that a rollout needs, around a tokenizer; encoded rows have tokens only."""

    def __init__(self) -> None:
        self.tokenizer = tiny_tokenizer()

    def encode(self, trajectory: Mapping[str, Any], add_generation_prompt: bool = False, **kwargs: Any) -> Any:
        ids = self.tokenizer.apply_chat_template(
            list(trajectory["messages"]),
            tools=trajectory.get("tools"),
            add_generation_prompt=add_generation_prompt,
            return_dict=True,
        )["input_ids"]
        return {"input_ids": ids, "labels": [-100] * len(ids)}

    def concat_input_feature(self, prompt_input_feature: Mapping[str, Any], new_tokens: Sequence[int]) -> Any:
        ids, labels = prompt_input_feature["input_ids"], prompt_input_feature["labels"]
        return {
            **prompt_input_feature,
            "input_ids": [*ids, *new_tokens],
            "labels": [*labels[:-1], *new_tokens, -100],
        }

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))


class Silent(ScriptedSampler):
    """A sampler that gives no log-probabilities, or `given` of them in its first turn."""

    given: list[Any] | None = None

    def _next(self, row: Any, params: Any) -> SampledSequence:
        sequence = super()._next(row, params)
        first = sum(message["role"] == "assistant" for message in row["messages"]) == 0
        return SampledSequence(sequence.stop_reason, sequence.tokens, self.given if first else None)


def tools() -> ToolManager:
    return ToolManager([CalculatorTool()])


def test_a_template_of_another_class_gives_the_same_row() -> None:
    sampler = ScriptedSampler([SUM, "It is 5."], TEMPLATE)
    [ours] = MultiTurnRollout(sampler, TEMPLATE, tools())(ASKED)
    [theirs] = MultiTurnRollout(sampler, Duck(), tools())(ASKED)
    for key in ("input_ids", "labels", "logprobs", "turns", "stop_reason", "truncated", "turn_tokens", "user_data"):
        assert theirs[key] == ours[key], key  # type: ignore[literal-required]
    assert [message["role"] for message in theirs["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert theirs["messages"][1]["tool_calls"] == ours["messages"][1]["tool_calls"]
    assert theirs["messages"][2]["content"] == "5"


class OwnCalls:
    """Reads `SUM a b` as a call, in place of the installed parsers."""

    def parse_tool_call(self, decoded: str) -> list[Any]:
        if "SUM" not in decoded:
            return []
        expression = " + ".join(decoded.split("SUM")[1].split()[:2])
        return [{"type": "function", "function": {"name": "calculator", "arguments": {"expression": expression}}}]

    def clean_tool_call(self, decoded: str) -> str:
        return decoded.split("SUM")[0].strip()


class OwnTemplate(OwnCalls, Template):  # type: ignore[misc]
    """A subclass with a format of its own."""


class OwnDuck(OwnCalls, Duck):
    """A template of another class with a format of its own."""


class Appending(OwnDuck):
    """Appends the message itself, without calls."""

    def concat_input_feature(self, prompt_input_feature: Mapping[str, Any], new_tokens: Sequence[int]) -> Any:
        row = super().concat_input_feature(prompt_input_feature, new_tokens)
        said = {"role": "assistant", "content": self.decode(new_tokens, skip_special_tokens=True)}
        return {**row, "messages": [*row["messages"], said]}


@pytest.mark.parametrize("template", [OwnTemplate(tokenizer=tiny_tokenizer()), OwnDuck(), Appending()])
def test_a_template_reads_the_calls_of_its_own_format(template: Any) -> None:
    sampler = ScriptedSampler(["so SUM 2 3", "It is 5."], TEMPLATE)
    [row] = MultiTurnRollout(sampler, template, tools())(ASKED)
    assert row["turns"] == 2  # type: ignore[typeddict-item]
    assert [message["role"] for message in row["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert row["messages"][1]["content"] == "so"
    assert row["messages"][2]["content"] == "5"


def test_a_template_without_clean_tool_call_keeps_the_text() -> None:
    class Reads(Duck):
        parse_tool_call = OwnCalls.parse_tool_call

    sampler = ScriptedSampler(["so SUM 2 3", "It is 5."], TEMPLATE)
    [row] = MultiTurnRollout(sampler, Reads(), tools())(ASKED)
    assert row["messages"][1]["content"] == "so SUM 2 3"
    assert row["messages"][2]["content"] == "5"


def test_a_bridge_closes_a_turn_that_ended_at_a_stop_string() -> None:
    for template in (TEMPLATE, Duck()):
        prompt = template.encode(ASKED[0], add_generation_prompt=True)
        tokens = template.tokenizer("a b", add_special_tokens=False)["input_ids"]
        row = {**ASKED[0], **template.concat_input_feature(prompt, tokens)}
        row["messages"] = [*ASKED[0]["messages"], {"role": "assistant", "content": "a b"}]
        extended = extend_with_bridge(row, [{"role": "user", "content": "c"}], template)  # type: ignore[arg-type]
        assert extended is not None
        messages = [*row["messages"], {"role": "user", "content": "c"}]
        assert extended["input_ids"] == template.encode({"messages": messages}, add_generation_prompt=True)["input_ids"]


def test_a_history_that_is_rendered_differently_ends_the_trajectory() -> None:
    class Forgets(Duck):
        def encode(self, trajectory: Mapping[str, Any], add_generation_prompt: bool = False, **kwargs: Any) -> Any:
            return super().encode({"messages": trajectory["messages"][-2:]}, add_generation_prompt)

    [row] = MultiTurnRollout(ScriptedSampler([SUM], TEMPLATE), Forgets(), tools())(ASKED)
    assert row["stop_reason"] == "bridge"


def test_something_that_is_no_template_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"template is a dict without encode\(\)"):
        MultiTurnRollout(ScriptedSampler(["a"], TEMPLATE), {})


def test_a_sampler_without_log_probabilities_gives_rows_without_them() -> None:
    for given in (None, []):
        sampler = Silent([SUM, "It is 5."], TEMPLATE)
        sampler.given = given
        [row] = MultiTurnRollout(sampler, TEMPLATE, tools())(ASKED)
        assert row["logprobs"] == []  # type: ignore[typeddict-item]
        assert row["turns"] == 2  # type: ignore[typeddict-item]
        [reference] = MultiTurnRollout(ScriptedSampler([SUM, "It is 5."], TEMPLATE), TEMPLATE, tools())(ASKED)
        assert row["input_ids"] == reference["input_ids"]  # type: ignore[typeddict-item]


def test_log_probabilities_of_some_tokens_are_an_error() -> None:
    sampler = Silent([SUM, "It is 5."], TEMPLATE)
    sampler.given = [[(1, -0.5)]]
    with pytest.raises(DataError, match="with 1 log-probabilities; give one a token, or none"):
        MultiTurnRollout(sampler, TEMPLATE, tools())(ASKED)

    class Once(ScriptedSampler):
        def sample(self, inputs: Any, *args: Any, **kwargs: Any) -> list[SampleResponse]:
            responses = super().sample(inputs, *args, **kwargs)
            if any(message["role"] == "tool" for row in inputs for message in row["messages"]):
                for response in responses:
                    response.sequences[0].logprobs = None
            return responses

    with pytest.raises(DataError, match="trained tokens and"):
        MultiTurnRollout(Once([SUM, "It is 5."], TEMPLATE), TEMPLATE, tools())(ASKED)
