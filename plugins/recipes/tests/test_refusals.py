"""What cannot work is told before the first step of a recipe, and leaves no run folder."""

import json
from pathlib import Path
from typing import Any

import pytest
from recipe_runs import run_recipe

from twinkle.errors import ArgumentError, CheckpointError, ComponentNotFound, ConfigError, DataError, EncodeError
from twinkle.testing import tiny_model
from twinkle_recipes.distillation.config import DistillationConfig
from twinkle_recipes.policy.config import GRPOConfig
from twinkle_recipes.preference.config import DPOConfig
from twinkle_recipes.preference.pairs import Kept
from twinkle_recipes.run import keeper

REWARD = "def short(trajectories, **kwargs):\n    return [float(-len(row['input_ids'])) for row in trajectories]\n"
ADVANTAGE = """
import torch


def plain(rewards, num_generations=1, scale="group"):
    return torch.as_tensor(rewards)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def values(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(keeper, "write_curve", lambda *_: None)  # a second each
    Path("rewards.py").write_text(REWARD)
    Path("advantage.py").write_text(ADVANTAGE)
    common = {"model": {"id": str(model), "mixed_precision": "no"}, "batch_size": 2, "max_steps": 1}
    talks(*(f"say {number}" for number in range(4)), answered=False)
    few = {"args": {"size": 8, "difficulty": 1, "language": "en"}, "max_length": 256, "eval_fraction": 0}
    policy = {
        "data": {"id": "talks.jsonl", "max_length": 128, "eval_fraction": 0},
        "sampling": {"num_generations": 2, "max_tokens": 4},
        "rewards": [{"name": "./rewards.py:short"}],
    }
    teacher = {"teacher": {"id": str(model), "mixed_precision": "no"}}
    rows = common | {"data": few}
    return {"grpo": common | policy, "dpo": rows, "gkd": rows | teacher, "embedding": rows}


def talks(*questions: str, answered: bool = True) -> dict[str, Any]:
    """Write conversations, and return `data` that reads them; without a question there is an answer alone."""
    answer = [{"role": "assistant", "content": "yes"}] if answered else []
    rows = [{"messages": [{"role": "user", "content": text}] * bool(text) + answer} for text in questions]
    Path("talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"id": "talks.jsonl", "max_length": 2000, "eval_fraction": 0}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("recipe", "changes", "error", "told"),
    [
        (
            "grpo",
            {"loss": {"name": "CrossEntropyLoss"}},
            ArgumentError,
            "passes old_logps, advantages to its loss, but",
        ),
        ("grpo", {"advantage": {"name": "GAEAdvantage"}}, ArgumentError, "scale is 'group'; it is 'batch' or 'none'"),
        ("grpo", {"data": {"type": "PackingDataset"}}, ConfigError, "PackingDataset packs several rows into one"),
        ("dpo", {"data": {"type": "PackingDataset"}}, ConfigError, "the recipe dpo needs separate rows"),
        ("dpo", {"loss": {"name": "CrossEntropyLoss"}}, ConfigError, "CrossEntropyLoss does not compare pairs"),
        ("gkd", {"data": {"type": "PackingDataset"}}, ConfigError, "the recipe gkd needs separate rows"),
        ("gkd", {"loss": {"name": "DPOLoss"}}, ArgumentError, "passes teacher_logits to its loss, but 'DPOLoss'"),
        (
            "gkd",
            {"teacher": {"topk": 300}},
            ConfigError,
            "teacher.topk must be at most the vocabulary size, 264, got 300",
        ),
        (
            "embedding",
            {"data": {"type": "LazyDataset"}},
            ConfigError,
            "encodes groups of texts in advance",
        ),
        ("gkd", {"teacher": {"type": "TransformersModl"}, "model": {"id": "nowhere"}}, ComponentNotFound, "Modl"),
    ],
)
def test_parts_that_do_not_fit_the_recipe(
    values: dict[str, Any], recipe: str, changes: dict[str, Any], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        run_recipe(recipe, values[recipe], **changes)
    assert list(Path("runs").iterdir()) == []


@pytest.mark.full
def test_an_advantage_must_bear_dropped_answers_where_they_are_dropped(values: dict[str, Any]) -> None:
    values["grpo"] |= {"advantage": {"name": "./advantage.py:plain"}}
    run_recipe("grpo", values["grpo"], root="fine")
    with pytest.raises(TypeError, match="group_ids"):
        run_recipe("grpo", values["grpo"], scoring={"on_error": "drop"})
    assert list(Path("runs").iterdir()) == []


@pytest.mark.parametrize(
    ("config", "values", "told"),
    [
        (GRPOConfig, {"sampling": {"top_k": 0}}, "greater than or equal to 1"),
        (GRPOConfig, {"sampling": {"stop": ""}}, "at least 1 character"),
        (GRPOConfig, {"sampling": {"stop": [".", ""]}}, "at least 1 character"),
        (DistillationConfig, {"teacher": {"id": "a"}, "sampling": {"top_k": -2}}, "greater than or equal to 1"),
        (DPOConfig, {"micro_batch_size": 1}, "greater than or equal to 2"),
    ],
)
def test_values_that_mean_nothing(config: Any, values: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        config.model_validate(values)


@pytest.mark.parametrize("on_policy", [0.5, 1.0])
def test_a_question_that_the_student_cannot_answer(values: dict[str, Any], on_policy: float) -> None:
    values["gkd"]["data"] = talks("one?", "", "two?")
    with pytest.raises(EncodeError, match=r"talks\.jsonl, row 1 \(line 2\): there is no prompt before the answer"):
        run_recipe("gkd", values["gkd"], on_policy=on_policy)
    values["gkd"]["data"] = talks("one?", "a" * 700, "two?" * 20)
    with pytest.raises(DataError, match="its longest prompt has 719 tokens, which leaves no room for an answer"):
        run_recipe("gkd", values["gkd"], on_policy=on_policy)
    assert list(Path("runs").iterdir()) == []


def test_a_long_answer_takes_no_room_from_the_student(values: dict[str, Any]) -> None:
    Path("talks.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "a" * 470}]})
    )
    values["gkd"]["data"] = {"id": "talks.jsonl", "max_length": 2000, "eval_fraction": 0}
    folder, _ = run_recipe("gkd", values["gkd"], on_policy=0.5, sampling={"max_tokens": 4})
    assert (folder / "adapter").is_dir()


def test_a_pair_is_named_by_its_place_in_the_file_whatever_is_held_out(values: dict[str, Any]) -> None:
    rows = [{"prompt": f"{number}?", "chosen": "yes", "rejected": "no"} for number in range(9)]
    rows.insert(7, {"prompt": "why? " * 60, "chosen": "so", "rejected": "no"})
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values["dpo"]["data"] = {"id": "rows.jsonl", "eval_fraction": 0.3, "max_length": 256}
    with pytest.raises(EncodeError, match=r"rows\.jsonl, row 7 \(line 8\): no token of 'positive' is trained"):
        run_recipe("dpo", values["dpo"])


def test_numbers_of_the_reference_that_are_damaged(values: dict[str, Any]) -> None:
    folder, _ = run_recipe("dpo", values["dpo"], reference={"cache": True})
    assert Kept.read(folder / "reference") is not None
    for damage in (b"", b"PK junk"):
        (folder / "reference" / "logps.npz").write_bytes(damage)
        with pytest.raises(CheckpointError, match=r"logps\.npz cannot be read .*; remove the folder"):
            Kept.read(folder / "reference")


def test_a_reference_with_other_tokens(values: dict[str, Any], tmp_path: Path) -> None:
    other = tiny_model(tmp_path / "other")
    file = other / "tokenizer.json"
    file.write_text(file.read_text().replace('"Q":', '"<other>":'))
    with pytest.raises(ConfigError, match=r"the reference .*other has a vocabulary of 259 tokens.* 2 entries differ"):
        run_recipe("dpo", values["dpo"], reference={"id": str(other)})


def test_one_key_of_the_schedule_leaves_the_others_as_they_are() -> None:
    for scheduler in ({}, {"name": "CosineWarmupScheduler"}, {"args": {}}):
        assert GRPOConfig.model_validate({"scheduler": scheduler}).scheduler.warmup(100) == 0
    assert GRPOConfig.model_validate({"scheduler": {"warmup_ratio": 0.1}}).scheduler.warmup(100) == 10
