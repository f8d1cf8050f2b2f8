"""A critic beside a policy: values of tokens learn, are saved and resumed, and PPO with GAE raises the reward."""

from pathlib import Path
from typing import Any

import pytest
import torch
from threads import one_thread  # noqa: F401 - a fixture

from twinkle.errors import ArgumentError
from twinkle.sampler import TorchSampler
from twinkle.testing import tiny_model
from twinkle_transformers.model import TransformersModel

LORA: dict[str, Any] = {"r": 4, "target_modules": "all-linear"}
ROWS: list[Any] = [
    {"input_ids": [9, 4, 5, 6, 7], "labels": [-100, 5, 6, 7, -100]},
    {"input_ids": [9, 8, 3], "labels": [8, 3, -100]},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


def critic(folder: Path, lora: Any = None, clip: float | None = None) -> TransformersModel:
    torch.manual_seed(0)
    options: dict[str, Any] = {"num_labels": 1, "classifier_dropout": 0.0, "mixed_precision": "no"}
    model = TransformersModel(model_cls="AutoModelForTokenClassification", model_id=str(folder), **options)
    if lora:
        model.add_adapter_to_model("default", lora)
    model.set_loss("ValueLoss", clip=clip)
    model.set_optimizer("AdamW", lr=3e-3)
    return model


def values_of(model: TransformersModel, rows: list[Any]) -> list[list[float]]:
    """Return the value at each trained token of each row."""
    values = model.forward_only(inputs=rows)["logits"][..., 0]
    return [
        [float(v) for v, y in zip(value, row["labels"], strict=False) if y != -100]
        for value, row in zip(values, rows, strict=True)
    ]


def test_the_dropout_of_a_head_is_that_which_was_asked_for(folder: Path) -> None:
    assert critic(folder).model.dropout.p == 0.0
    with pytest.raises(ArgumentError, match="AutoModelForCausalLM has none"):
        TransformersModel(model_id=str(folder), classifier_dropout=0.0)


@pytest.mark.parametrize("lora", [None, LORA])
def test_a_critic_learns_its_returns_and_goes_on_as_if_it_had_not_been_saved(
    folder: Path, tmp_path: Path, lora: Any
) -> None:
    returns = [[1.0, -1.0, 0.5], [0.0, 2.0]]
    model = critic(folder, lora)

    def train(model: TransformersModel, steps: int, size: int | None = None) -> list[float]:
        losses = []
        for _ in range(steps):
            losses.append(model.forward_backward(inputs=ROWS, returns=returns, micro_batch_size=size)["loss"])
            model.clip_grad_and_step()
        return losses

    first = train(model, 15, size=1)
    assert first[-1] < 0.5 * first[0]
    saved = model.save("here", str(tmp_path), save_optimizer=True)
    on = train(model, 3)
    again = critic(folder, lora)
    again.resume_from_checkpoint(str(saved))
    assert train(again, 3) == on
    assert values_of(again, ROWS) == values_of(model, ROWS)


def advantages_of(rewards: list[float], values: list[float], gamma: float = 0.9, decay: float = 0.9) -> list[float]:
    """Generalized advantage estimation, from the last token back (arXiv:1506.02438, eq. 16)."""
    found, running, after = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        running = reward + gamma * after - value + gamma * decay * running
        found.append(running)
        after = value
    return found[::-1]


@pytest.mark.full
def test_ppo_with_a_critic_raises_the_reward_and_the_critic_foresees_it(folder: Path) -> None:
    """A token is worth 1 if it is one of the first half of the vocabulary."""
    torch.manual_seed(0)
    policy = TransformersModel(model_id=str(folder), mixed_precision="no")
    policy.set_loss("PPOLoss")
    policy.set_optimizer("AdamW", lr=1e-2)
    judge = critic(folder, clip=0.5)
    sampler = TorchSampler(model=policy)
    prompts = [{"input_ids": [n, n + 1, n + 2]} for n in range(6)]
    means, errors = [], []
    for step in range(14):
        params = {"max_tokens": 5, "stop": [], "logprobs": 1, "seed": step, "num_samples": 8}
        sequences = [s for response in sampler.sample(prompts, params) for s in response.sequences]
        rows = [s.new_input_feature for s in sequences]
        old = [[pairs[0][1] for pairs in s.logprobs or []] for s in sequences]
        rewards = [[float(token < 132) for token in s.tokens] for s in sequences]
        values = values_of(judge, rows)
        gains = [advantages_of(r, v) for r, v in zip(rewards, values, strict=True)]
        returns = [[g + v for g, v in zip(gain, value, strict=True)] for gain, value in zip(gains, values, strict=True)]
        policy.forward_backward(inputs=rows, old_logps=old, advantages=gains, micro_batch_size=8)
        policy.clip_grad_and_step()
        for _ in range(2):
            out = judge.forward_backward(inputs=rows, returns=returns, old_values=values, micro_batch_size=8)
            judge.clip_grad_and_step()
        means.append(sum(map(sum, rewards)) / sum(map(len, rewards)))
        errors.append(out["loss"])
    assert means[0] < 0.65
    assert min(means[-3:]) > 0.9
    assert max(errors[-3:]) < 0.5 * errors[0]
