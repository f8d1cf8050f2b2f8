"""From a row of a data set to its reward, its advantage and a step: what data, rewards, losses and metrics promise."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from twinkle import registry
from twinkle.advantage import GAEAdvantage, GRPOAdvantage, ReinforcePlusPlusAdvantage
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel
from twinkle.template import Template
from twinkle.testing import tiny_model

GOOD = 1.0
TEXT: list[tuple[str, dict[str, list[Any]], str, list[tuple[str, float]]]] = [
    (
        "GSM8KProcessor",
        {"question": ["How many?"], "answer": ["5 + 5 = 10\n#### 1,010"]},
        "GSM8KAccuracyReward",
        [("Let me see.\n#### 1010", GOOD), ("#### 101", 0.0), ("\\boxed{1,010}", GOOD), ("1010", 0.0)],
    ),
    (
        "CompetitionMathGRPOProcessor",
        {"problem": ["Half of one?"], "solution": ["It is \\boxed{\\frac{1}{2}}."]},
        "MathReward",
        [("So \\boxed{\\frac12}.", GOOD), ("So \\boxed{0.5}.", GOOD), ("So \\boxed{2}.", 0.0), ("0.5", 0.0)],
    ),
    (
        "CountdownProcessor",
        {"nums": [[3, 4, 5]], "target": [17]},
        "CountdownReward",
        [("<think>?</think><answer>3 * 4 + 5</answer>", GOOD), ("<answer>17</answer>", 0.0), ("3 * 4 + 5", 0.0)],
    ),
    (
        "QuestionProcessor",
        {"question": ["2 + 3?"], "answer": [5]},
        "ExactMatchReward",
        [("5", GOOD), ("5.0", GOOD), ("6", 0.0), ("It is 5", 0.0)],
    ),
]
IMAGES: list[tuple[str, dict[str, list[Any]], str, list[tuple[str, float]]]] = [
    (
        "CLEVRProcessor",
        {"image": ["a.png"], "problem": ["How many?"], "solution": ["<answer> 3 </answer>"]},
        "MultiModalAccuracyReward",
        [("<think>?</think><answer>3</answer>", GOOD), ("<answer>4</answer>", 0.0), ("3", 0.0)],
    ),
    (
        "OlympiadBenchProcessor",
        {"question": ["Find both."], "final_answer": [["2", "$\\frac{1}{3}$"]], "images": [[]]},
        "OlympiadBenchAccuracyReward",
        [("\\boxed{\\frac13, 2}", GOOD), ("\\boxed{2}", 0.5), ("\\boxed{2, 3, 4, 5}", 0.25), ("2, 1/3", 0.0)],
    ),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def rows_of(preprocessor: str, columns: dict[str, list[Any]]) -> list[dict[str, Any]]:
    made = registry().build(preprocessor, "preprocessor")(columns)
    return [dict(zip(made, values, strict=True)) for values in zip(*made.values(), strict=True)]


@pytest.mark.parametrize(("preprocessor", "columns", "reward", "answers"), TEXT)
def test_an_answer_that_was_sampled_is_scored(
    preprocessor: str, columns: Any, reward: str, answers: Any, tiny: Path
) -> None:
    template, (row,) = Template(str(tiny)), rows_of(preprocessor, columns)
    prompt = template.encode(row, add_generation_prompt=True)
    sampled = [template.concat_input_feature(prompt, template.tokenizer.encode(said)) for said, _ in answers]
    assert registry().build(reward, "reward")(sampled) == [expected for _, expected in answers]


@pytest.mark.parametrize(("preprocessor", "columns", "reward", "answers"), IMAGES)
def test_an_answer_about_an_image_is_scored(preprocessor: str, columns: Any, reward: str, answers: Any) -> None:
    (row,) = rows_of(preprocessor, columns)
    said = [{**row, "messages": [*row["messages"], {"role": "assistant", "content": text}]} for text, _ in answers]
    assert registry().build(reward, "reward")(said) == [expected for _, expected in answers]


def test_advantages_of_rows_and_of_tokens_train_and_micro_batches_change_nothing(tiny: Path) -> None:
    dataset = Dataset(DatasetMeta("builtin://sums"), size=2)
    template = Template(str(tiny))
    said = ["1", str(dataset[0]["answer"]), "It is 12.", str(dataset[1]["answer"])]
    prompts = [template.encode(dataset[place // 2], add_generation_prompt=True) for place in range(4)]
    tokens = [template.tokenizer.encode(text) for text in said]
    inputs = [template.concat_input_feature(*pair) for pair in zip(prompts, tokens, strict=True)]
    rewards = registry().build("ExactMatchReward", "reward")(inputs)
    assert rewards == [0.0, 1.0, 0.0, 1.0]

    old = [[-1.0 - 0.1 * place for place in range(len(row))] for row in tokens]
    forms = [
        GRPOAdvantage()(rewards, num_generations=2),
        ReinforcePlusPlusAdvantage(kl_coef=0.1)(
            rewards, 2, old_logps=old, ref_logps=[[-1.5] * len(row) for row in old]
        ),
        GAEAdvantage()(rewards, values=[[0.1] * len(row) for row in tokens]),
    ]
    for advantages in forms:
        seen = [numbers(tiny, inputs, old, advantages, size) for size in (4, 1)]
        assert seen[0] == pytest.approx(seen[1], rel=1e-4, abs=1e-6)
        assert seen[0]["grad_norm"] > 0


def numbers(tiny: Path, inputs: Any, old: Any, advantages: Any, micro_batch_size: int) -> Any:
    torch.manual_seed(0)
    model = TransformersModel(model_id=str(tiny), mixed_precision="no")
    model.add_adapter_to_model("default", peft.LoraConfig(r=2, target_modules="all-linear"))
    model.set_optimizer("AdamW", lr=1e-3)
    model.set_loss("GRPOLoss")
    model.add_metric("GRPOMetric", is_training=True)
    model.forward_backward(inputs=inputs, old_logps=old, advantages=advantages, micro_batch_size=micro_batch_size)
    model.clip_grad_and_step()
    values = model.calculate_metric(is_training=True)
    return {name: value for name, value in values.items() if name in ("loss", "grad_norm") or name.startswith("train/")}
