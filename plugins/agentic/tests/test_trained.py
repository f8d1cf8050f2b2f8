"""From turns to a gradient: what a rollout returns is trained where it was sampled, and nowhere else."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from twinkle.data_format import SamplingParams
from twinkle.env import StepResult
from twinkle.loss import GRPOLoss
from twinkle.model import TransformersModel
from twinkle.sampler import TorchSampler
from twinkle.template import Template
from twinkle.testing import tiny_model
from twinkle_agentic.envs import EnvTool
from twinkle_agentic.examples import CountdownEnv
from twinkle_agentic.rollout import MultiTurnRollout
from twinkle_agentic.tools import CalculatorTool, ToolManager

PARAMS = SamplingParams(max_tokens=30, stop=list(range(0, 256, 4)), seed=3)  # any of 64 bytes ends a turn


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Eager(Template):
    """Takes every turn for a call, so that a random model acts."""

    def _assistant_message(self, new_tokens: Any) -> dict[str, Any]:
        number = 1 + new_tokens[0] % 3
        call = {"id": "call_0", "type": "function", "function": {"name": "take", "arguments": {"number": number}}}
        return {**super()._assistant_message(new_tokens), "tool_calls": [call]}


class Steps(CountdownEnv):
    """Rewards each step by what was taken."""

    def step(self, tool_name: str, arguments: Mapping[str, Any]) -> StepResult:
        result = super().step(tool_name, arguments)
        return StepResult(result.observation, float(arguments["number"]), result.done)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tiny_model(tmp_path_factory.mktemp("base"), "qwen3", initializer_range=0.2)
    made = TransformersModel(model_id=str(folder), mixed_precision="no")
    made.set_template(Eager, model_id=made.model_id)
    made.set_loss("GRPOLoss", epsilon=0.2)
    made.set_optimizer("SGD", lr=0.1)
    return made


@pytest.fixture(scope="module")
def rows(model: Any) -> list[Any]:
    """Six trajectories, two questions with three each, of up to four turns."""
    sampler = TorchSampler(model=model)
    sampler.set_template(Eager, model_id=model.model_id)
    questions = [text for text in ("How many?", "And now?") for _ in range(3)]
    prompts: Any = [{"messages": [{"role": "user", "content": text}]} for text in questions]
    managers = [ToolManager(EnvTool.from_env(Steps(8))) for _ in prompts]
    found: Any = MultiTurnRollout(sampler, None, managers, PARAMS, max_turns=4)(prompts)
    assert {row["turns"] for row in found} != {1}
    return list(found)


def advantages(rows: list[Any]) -> list[list[float]]:
    """Per-turn rewards to per-token advantages: what is still to come, less the mean of the group at that turn."""
    to_go = [[math.fsum(row["turn_rewards"][turn:]) for turn in range(row["turns"])] for row in rows]
    found = []
    for place, row in enumerate(rows):
        group = to_go[place // 3 * 3 :][:3]
        means = [math.fsum(own[turn] for own in group if turn < len(own)) / sum(turn < len(own) for own in group)
                 for turn in range(row["turns"])]  # fmt: skip
        per_turn = [own - mean for own, mean in zip(to_go[place], means, strict=True)]
        found.append([value for value, count in zip(per_turn, row["turn_tokens"], strict=True) for _ in range(count)])
    return found


@pytest.mark.full
def test_the_log_probabilities_of_a_rollout_are_the_models_own_at_the_trained_positions(
    model: Any, rows: list[Any]
) -> None:
    outputs = model.forward_only(inputs=rows)
    for row, logps in zip(rows, outputs["logps"], strict=True):
        trained = [place for place, label in enumerate(row["labels"]) if label != -100]
        assert logps[trained].tolist() == pytest.approx(row["logprobs"], abs=2e-5)
        assert logps[: len(row["labels"])].count_nonzero() == len(trained)


@pytest.mark.full
def test_turns_of_the_same_call_are_drawn_again_with_the_same_seed_and_not_alike(rows: list[Any], model: Any) -> None:
    sampler = TorchSampler(model=model)
    sampler.set_template(Eager, model_id=model.model_id)
    prompts: Any = [{"messages": row["messages"][:1]} for row in rows]
    managers = [ToolManager(EnvTool.from_env(Steps(8))) for _ in prompts]
    again: Any = MultiTurnRollout(sampler, None, managers, PARAMS, max_turns=4)(prompts)
    assert [row["input_ids"] for row in again] == [row["input_ids"] for row in rows]
    assert len({tuple(row["input_ids"]) for row in rows}) == len(rows)


def test_prompt_and_bridges_have_exactly_no_weight_in_the_gradient(rows: list[Any]) -> None:
    width = max(row["length"] for row in rows)
    labels = torch.full((len(rows), width), -100)
    for place, row in enumerate(rows):
        labels[place, : row["length"]] = torch.tensor(row["labels"])
    draw = torch.Generator().manual_seed(1)
    logps = (torch.rand(labels.shape, generator=draw, dtype=torch.float64) * -3).requires_grad_()
    weights = advantages(rows)
    old = [row["logprobs"] for row in rows]
    result = GRPOLoss(epsilon=0.2)({"labels": labels}, {"logps": logps}, old_logps=old, advantages=weights)
    result.loss_sum.backward()
    assert logps.grad is not None
    assert torch.all(logps.grad[labels == -100] == 0)
    expected = 0.0
    for place, row in enumerate(rows):
        where = [spot for spot, label in enumerate(row["labels"]) if label != -100]
        terms = []
        for spot, before, weight in zip(where, old[place], weights[place], strict=True):
            ratio = math.exp(logps[place, spot].item() - before)
            terms.append(-min(ratio * weight, min(max(ratio, 0.8), 1.2) * weight))
        expected += math.fsum(terms) / len(terms)
    assert result.loss_sum.item() == pytest.approx(expected, rel=1e-9)
    assert result.denominator == len(rows)


def test_a_step_on_turns_is_the_same_however_it_is_cut(model: Any, rows: list[Any]) -> None:
    weights, old = advantages(rows), [row["logprobs"] for row in rows]
    gradients = []
    for micro in (None, 1, 4):
        model.zero_grad()
        model.forward_backward(inputs=rows, old_logps=old, advantages=weights, micro_batch_size=micro)
        gradients.append(torch.cat([p.grad.flatten() for p in model.model.parameters() if p.grad is not None]))
    assert gradients[0].norm() > 1e-3
    for other in gradients[1:]:
        assert torch.allclose(gradients[0], other, atol=1e-6)
    model.clip_grad_and_step()
    assert math.isfinite(model.calculate_metric(is_training=True)["loss"])


def test_what_tools_answered_changes_no_label(model: Any, rows: list[Any], tmp_path: Path) -> None:
    """The trained tokens of a row are the assistant's turns, spelled out, and nothing of what stands between them."""
    tokenizer = Template(model.model_id).tokenizer
    for row in rows:
        trained = [label for label in row["labels"] if label != -100]
        pieces, start = [], 0
        for count in row["turn_tokens"]:
            pieces.append(tokenizer.decode(trained[start : start + count], skip_special_tokens=True))
            start += count
        turns = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        assert pieces == turns
        assert "There are" not in "".join(pieces)


def test_a_row_that_outgrows_the_models_context_ends_and_its_neighbour_goes_on(model: Any) -> None:
    sampler = TorchSampler(model=model)
    sampler.set_template(Eager, model_id=model.model_id)
    prompts: Any = [{"messages": [{"role": "user", "content": text}]} for text in ("a", "b")]
    managers = [ToolManager({"take": Answers(answer)}) for answer in ("y" * 600, "ok")]
    long, short = MultiTurnRollout(sampler, None, managers, PARAMS, max_turns=3)(prompts)
    assert (long["stop_reason"], long["turns"], long["truncated"]) == ("context", 1, True)
    assert (short["stop_reason"], short["turns"]) == ("max_turns", 3)
    assert long["length"] < 512


class Answers(CalculatorTool):
    """Answers everything with one text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __call__(self, tool_name: str, arguments: Mapping[str, Any]) -> str:
        return self.text
