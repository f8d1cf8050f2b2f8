"""A rollout with a sampler of a service is the local rollout, token for token."""

from types import SimpleNamespace
from typing import Any

import pytest

from twinkle.errors import RequirementMissing
from twinkle.rollout import MultiTurnRollout
from twinkle.template import Template
from twinkle.testing import tiny_tokenizer
from twinkle_agentic.examples import ScriptedSampler
from twinkle_agentic.tools import CalculatorTool, ToolManager
from twinkle_client import rollout, wire
from twinkle_client.errors import RequestRefused
from twinkle_client.rollout import ClientMultiTurnRollout

TEMPLATE = Template(tokenizer=tiny_tokenizer())
SUM = '<tool_call>{"name": "calculator", "arguments": {"expression": "2 + 3"}}</tool_call>'
ASKED = [{"messages": [{"role": "user", "content": "2 + 3?"}], "user_data": [["row", 1]]}] * 2


class OverTheWire:
    """Answers as a service does: what is sent and received has passed the wire."""

    def __init__(self, longest: int = 10_000) -> None:
        self._local, self._longest = ScriptedSampler([SUM, "It is 5."], TEMPLATE), longest

    def sample(self, inputs: Any, sampling_params: Any = None) -> list[Any]:
        rows = wire.unpack(wire.pack(list(inputs)))
        if any(len(row["input_ids"]) > self._longest for row in rows):
            raise RequestRefused("row 0 has more tokens than the context")
        answers = []
        for response in self._local.sample(rows, sampling_params):
            fields = [
                {"tokens": one.tokens, "logprobs": one.logprobs, "stop_reason": one.stop_reason}
                for one in response.sequences
            ]
            sent = wire.unpack(wire.pack(fields))
            answers.append(SimpleNamespace(sequences=[SimpleNamespace(**one) for one in sent]))
        return answers


def managed() -> ToolManager:
    return ToolManager([CalculatorTool()])


@pytest.mark.parametrize("most", [None, 200])
def test_it_is_the_local_rollout(most: int | None) -> None:
    local = MultiTurnRollout(ScriptedSampler([SUM, "It is 5."], TEMPLATE), TEMPLATE, managed(), {}, 3, most)(ASKED)
    remote = ClientMultiTurnRollout(OverTheWire(), TEMPLATE, managed(), {}, 3, most)(ASKED)
    assert remote == local
    assert remote[0]["turns"] == (2 if most is None else remote[0]["turns"])


def test_a_row_that_outgrows_the_context_ends_alone() -> None:
    length = len(TEMPLATE.encode(ASKED[0], add_generation_prompt=True)["input_ids"])
    [row, _] = ClientMultiTurnRollout(OverTheWire(length + 8), TEMPLATE, managed())(ASKED)
    assert (row["stop_reason"], row["turns"]) == ("context", 1)


def test_without_the_extra_it_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from twinkle import registry
    from twinkle.errors import ComponentNotFound

    def missing(*_: Any) -> Any:
        raise ComponentNotFound("no rollout")

    monkeypatch.setattr(registry(), "resolve", missing)
    with pytest.raises(RequirementMissing, match=r"twinkle-client\[rollout\]"):
        rollout.ClientMultiTurnRollout(OverTheWire(), TEMPLATE)
