"""GRPO and RLOO on a tiny model: what a run leaves, what decides an update, and what bad input does."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from recipe_runs import lines, merged, run_recipe, timeless

from twinkle.errors import ConfigError, DataError, EncodeError
from twinkle.testing import tiny_model
from twinkle_recipes.policy.config import GRPOConfig, RLOOConfig

REWARDS = '''
import math, os, signal


def said(row):
    return row["messages"][-1]["content"]


def letters(trajectories, **kwargs):
    """The share of plain letters in an answer: what a tiny random model can learn in a few steps."""
    return [sum(c.isascii() and c.isalpha() for c in said(row)) / max(len(said(row)), 1) for row in trajectories]


def length(trajectories, **kwargs):
    return [float(len(said(row))) for row in trajectories]


def pressing(trajectories, **kwargs):
    """Presses Ctrl-C, once."""
    if not os.path.exists("pressed"):
        open("pressed", "w").close()
        os.kill(os.getpid(), signal.SIGINT)
    return letters(trajectories)


def equal(trajectories, **kwargs):
    return [1.0 for _ in trajectories]


def junk(trajectories, **kwargs):
    """NaN for the first answer of each prompt."""
    return [math.nan if index % 4 == 0 else float(index) for index, _ in enumerate(trajectories)]


def none(trajectories, **kwargs):
    return [math.nan for _ in trajectories]
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), initializer_range=0.1)


@pytest.fixture
def values(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)
    rows = [{"messages": [{"role": "user", "content": f"say {number}"}]} for number in range(12)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "model": {"id": str(model), "mixed_precision": "no"},
        "data": {"id": "prompts.jsonl", "max_length": 128, "eval_fraction": 0.2},
        "lora": {"rank": 4},
        "optimizer": {"lr": 0.01},
        "sampling": {"num_generations": 4, "max_tokens": 8},
        "rewards": [{"name": "./rewards.py:letters"}],
        "batch_size": 4,
        "max_steps": 3,
        "trackers": ["JsonlTracker"],
    }


def train(values: Mapping[str, Any], recipe: str = "grpo", **changes: Any) -> tuple[Path, dict[str, Any]]:
    return run_recipe(recipe, values, **changes)


def test_a_run_leaves_everything_that_says_how(values: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    folder, summary = train(values, eval_every=2, completions_every=3, reference="always")
    steps = lines(folder)
    assert [line["step"] for line in steps] == [0, 1, 2, 3]
    assert [line["step"] for line in steps if "eval/reward" in line] == [0, 2, 3]
    told = {"reward", "reward_std", "reward/letters", "completion_length", "truncated", "tokens", "loss"}
    told |= {"kl", "approx_kl", "clip_ratio", "learning_rate", "grad_norm", "tokens_per_second", "seconds/sample"}
    assert told <= set(steps[1])
    for name in ("reward.png", "kl.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    answers = lines(folder, "completions.jsonl")
    assert len(answers) == 16 + 16 + 8  # ten prompts are trained on
    assert {line["prompt"] for line in answers[:4]} == {answers[0]["prompt"]}
    first = answers[:16]
    assert sum(line["reward"] for line in first) / 16 == pytest.approx(steps[1]["reward"])
    assert sum(line["advantage"] for line in first[:4]) == pytest.approx(0, abs=1e-5)
    assert GRPOConfig.model_validate(yaml.safe_load((folder / "config.yaml").read_text())).max_steps == 3
    parts = {part["kind"] for part in json.loads((folder / "plugins.json").read_text())["parts"]}
    assert {"recipe", "sampler", "reward", "advantage", "loss"} <= parts
    assert (summary["steps"], summary["eval/reward"]) == (3, steps[-1]["eval/reward"])
    assert (Path(summary["path"]) / "adapter_model.safetensors").is_file()
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "answers of step 3" in out
    assert f"before training: eval/reward={steps[0]['eval/reward']:.4f}" in out
    assert not {"accuracy", "correct_tokens"} & set(steps[1])
    assert len([line for line in out.splitlines() if line.startswith("  prompt=")]) == 4


@pytest.mark.full
def test_the_first_update_is_taken_where_the_sampler_stood(values: dict[str, Any]) -> None:
    folder, _ = train(values, max_steps=1, reference="always", data={"eval_fraction": 0})
    (step,) = lines(folder)
    assert step["approx_kl"] < 1e-9
    assert step["kl"] < 1e-9  # a fresh adapter is the reference
    assert step["clip_ratio"] == 0


@pytest.mark.full
def test_answers_end_before_a_stop_text(values: dict[str, Any]) -> None:
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    free, _ = train(values, max_steps=1)
    ended, _ = train(values, max_steps=1, sampling={"stop": letters})
    found = [{c for line in lines(folder, "completions.jsonl") for c in line["completion"]} for folder in (free, ended)]
    assert [bool(characters.intersection(letters)) for characters in found] == [True, False]


def test_reward_rises(values: dict[str, Any]) -> None:
    folder, _ = train(values, lora=None, max_steps=15, optimizer={"lr": 0.005}, data={"eval_fraction": 0})
    rewards = [line["reward"] for line in lines(folder)]
    assert sum(rewards[-3:]) > 2 * sum(rewards[:3])


@pytest.mark.full
def test_own_weights_synced_each_step_make_the_same_run_as_shared_ones(values: dict[str, Any]) -> None:
    shared, _ = train(values)
    for merge in (True, False):
        own, _ = train(values, sampling={"weights": "own", "merge_and_sync": merge, "args": {"dtype": "float32"}})
        for one, other in zip(lines(shared), lines(own), strict=True):
            assert one.get("loss") == pytest.approx(other.get("loss"), abs=1e-5)
            assert one.get("reward") == pytest.approx(other.get("reward"), abs=1e-6)


@pytest.mark.full
def test_mini_batches_and_iterations_are_updates(values: dict[str, Any]) -> None:
    folder, _ = train(
        values, max_steps=2, mini_batch_size=8, num_iterations=2, save_every=1, micro_batch_size=4, old_logps="trainer",
        loss={"args": {"tis_cap": 2.0}}, metrics=["GRPOMetric"],
    )  # fmt: skip
    state = json.loads((folder / "checkpoints" / "step-2" / "trainer_state.json").read_text())
    assert state["updates"] == 2 * 2 * 2
    assert state["loop"] == {"step": 2}
    steps = lines(folder)[1:]
    assert all(line["approx_kl"] > 0 for line in steps)  # later updates of a step have moved
    assert all(line["rollout_kl"] < 1e-9 for line in steps)  # sampler and trainer compute the same
    assert all(line["tis_clip_ratio"] == 0 for line in steps)
    assert any(name.startswith("train/") for name in steps[0])  # a metric named in the configuration


@pytest.mark.full
def test_the_batch_size_in_memory_changes_no_number(values: dict[str, Any]) -> None:
    whole, _ = train(values)
    parts, _ = train(values, micro_batch_size=3)
    for one, other in zip(lines(whole), lines(parts), strict=True):
        assert one.get("loss") == pytest.approx(other.get("loss"), abs=1e-5)


@pytest.mark.full
def test_all_parameters_are_compared_with_a_frozen_copy(values: dict[str, Any]) -> None:
    folder, summary = train(values, lora=None, loss={"args": {"beta": 0.1}}, optimizer={"lr": 1e-3})
    first, *rest = lines(folder)[1:]
    assert first["kl"] < 1e-9
    assert all(line["kl"] > 1e-7 for line in rest)
    assert (Path(summary["path"]) / "model.safetensors").is_file()


@pytest.mark.full
def test_rloo_is_the_plain_policy_gradient_with_the_others_as_baseline(values: dict[str, Any]) -> None:
    folder, _ = train(values, "rloo", max_steps=1)
    answers = lines(folder, "completions.jsonl")[:4]
    rewards = [line["reward"] for line in answers]
    for line in answers:
        others = (sum(rewards) - line["reward"]) / 3
        assert line["advantage"] == pytest.approx(line["reward"] - others, abs=1e-6)
    parts = {part["kind"]: part["asked"] for part in json.loads((folder / "plugins.json").read_text())["parts"]}
    assert (parts["loss"], parts["advantage"], parts["recipe"]) == ("ReinforceLoss", "RLOOAdvantage", "rloo")


@pytest.mark.full
def test_several_rewards_count_by_their_weights(values: dict[str, Any]) -> None:
    rewards = [{"name": "./rewards.py:letters", "weight": 2.0}, {"name": "./rewards.py:length", "weight": 0.5}]
    folder, _ = train(values, max_steps=1, rewards=rewards)
    for line in lines(folder, "completions.jsonl"):
        parts = line["rewards"]
        wanted = 2 * parts["letters"] + 0.5 * parts["length"]
        assert line["reward"] == pytest.approx(wanted)


@pytest.mark.full
def test_ctrl_c_ends_after_the_step_and_the_run_goes_on_in_the_same_numbers(
    values: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    values = merged(values, {"rewards": [{"name": "./rewards.py:pressing"}], "data": {"eval_fraction": 0}})
    Path("pressed").touch()
    whole, _ = train(values)
    Path("pressed").unlink()
    with pytest.raises(KeyboardInterrupt):
        train(values)
    stopped = max(Path("runs").iterdir(), key=lambda folder: folder.stat().st_ctime_ns)
    assert (stopped / "checkpoints" / "last").read_text() == "step-1\n"
    assert f"twinkle run grpo --resume_from {stopped}\n" in capsys.readouterr().out
    train(values, resume_from=str(stopped))
    assert timeless(stopped) == timeless(whole)
    with pytest.raises(ConfigError, match=r"sampling\.max_tokens: 8 in .*, 9 now"):
        train(values, resume_from=str(stopped), sampling={"max_tokens": 9})


# What goes wrong


@pytest.mark.full
def test_equal_rewards_teach_nothing_and_are_told_of_once(
    values: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = train(values, rewards=[{"name": "./rewards.py:equal"}])
    assert [line["grad_norm"] for line in lines(folder)[1:]] == [0.0, 0.0, 0.0]
    assert len([r for r in caplog.records if "have the same reward" in r.getMessage()]) == 1
    assert all(line["advantage"] == 0 for line in lines(folder, "completions.jsonl"))


@pytest.mark.full
def test_a_reward_that_is_no_number_stops_the_run_unless_told_otherwise(values: dict[str, Any]) -> None:
    values = merged(values, {"rewards": [{"name": "./rewards.py:junk"}], "max_steps": 1, "data": {"eval_fraction": 0}})
    with pytest.raises(DataError, match="junk"):
        train(values)
    zero, _ = train(values, scoring={"on_error": "zero"})
    assert [line["reward"] for line in lines(zero, "completions.jsonl")][:4] == [0.0, 1.0, 2.0, 3.0]
    dropped, _ = train(values, scoring={"on_error": "drop"})
    assert [line["reward"] for line in lines(dropped, "completions.jsonl")][:4] == [None, 1.0, 2.0, 3.0]
    (step,) = lines(dropped)
    assert step["dropped"] == 4
    assert math.isfinite(step["loss"])


def test_a_step_without_one_rewarded_answer_updates_nothing(values: dict[str, Any]) -> None:
    folder, _ = train(
        values, max_steps=2, rewards=[{"name": "./rewards.py:none"}], scoring={"on_error": "drop"}, save_every=1,
        data={"eval_fraction": 0},
    )  # fmt: skip
    assert [(line["untrained"], line["dropped"]) for line in lines(folder)] == [(1, 16), (1, 16)]
    state = json.loads((folder / "checkpoints" / "step-2" / "trainer_state.json").read_text())
    assert (state["updates"], state["loop"]) == (0, {"step": 2})


@pytest.mark.full
def test_an_update_that_is_not_finite_is_told_of_and_left_out(
    values: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("losses.py").write_text(
        "from twinkle.loss import GRPOLoss\n"
        "class Broken(GRPOLoss):\n"
        "    def __call__(self, *args, **kwargs):\n"
        "        found = super().__call__(*args, **kwargs)\n"
        "        found.loss_sum = found.loss_sum * float('nan')\n"
        "        return found\n"
    )
    folder, _ = train(values, max_steps=1, loss={"name": "./losses.py:Broken"}, on_nonfinite="skip")
    step = lines(folder)[-1]
    assert (step["loss"], step["nonfinite_skipped"]) == (None, 1)
    assert " loss=nan nonfinite_skipped=1 " in capsys.readouterr().out


@pytest.mark.full
def test_an_answer_without_a_token_is_rewarded_and_not_trained(values: dict[str, Any]) -> None:
    (Path.cwd() / "silent.py").write_text(
        "from twinkle.sampler import TorchSampler\n"
        "class Silent(TorchSampler):\n"
        "    def sample(self, *args, **kwargs):\n"
        "        responses = super().sample(*args, **kwargs)\n"
        "        for response in responses:\n"
        "            first = response.sequences[0]\n"
        "            first.tokens, first.logprobs, first.decoded, first.new_input_feature = [], [], '', None\n"
        "        return responses\n"
    )
    folder, _ = train(values, max_steps=1, sampling={"name": "./silent.py:Silent"})
    answers = lines(folder, "completions.jsonl")
    assert [(line["tokens"], line["completion"]) for line in answers[::4]] == [(0, "")] * 4
    assert math.isfinite(lines(folder)[-1]["loss"])


@pytest.mark.parametrize(
    ("kind", "changes", "told"),
    [
        (RLOOConfig, {"sampling": {"num_generations": 1}}, "must be at least 2, because RLOO compares"),
        (GRPOConfig, {"reference": "never", "loss": {"args": {"beta": 0.1}}}, "beta requires a reference"),
        (GRPOConfig, {"loss": {"args": {"tis_cap": 2.0}}}, "old_logps: trainer"),
        (GRPOConfig, {"mini_batch_size": 99}, "must be at most 16, the number of answers per step"),
        (GRPOConfig, {"sampling": {"temperature": 0}}, "greater than 0"),
        (GRPOConfig, {"rewards": []}, "at least 1"),
        (GRPOConfig, {"rewards": [{"name": "./a.py:A"}, {"name": "b:A"}]}, "names of rewards must be unique"),
        (GRPOConfig, {"rewards": [{"name": "A"}, {"name": "A"}]}, "names of rewards must be unique"),
        (GRPOConfig, {"data": {"truncation": "right"}}, "raise"),
    ],
)
def test_what_cannot_work_is_refused_at_once(
    values: dict[str, Any], kind: type[GRPOConfig], changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        kind.model_validate(merged(values, changes))


def test_prompts_without_room_are_found_before_the_first_step(values: dict[str, Any]) -> None:
    row = {"messages": [{"role": "user", "content": "a" * 700}]}
    Path("prompts.jsonl").write_text((json.dumps(row) + "\n") * 3)
    with pytest.raises(EncodeError, match=r"prompts\.jsonl"):
        train(values, data={"eval_fraction": 0})
    with pytest.raises(DataError, match="which leaves no room for an answer"):
        train(values, data={"eval_fraction": 0, "max_length": 2000})
    assert list(Path("runs").iterdir()) == []


def test_a_stream_has_no_rows_to_go_back_to(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="the recipe grpo needs indexed rows"):
        train(values, data={"type": "IterableDataset"})
