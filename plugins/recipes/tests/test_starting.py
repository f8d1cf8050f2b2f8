"""A run may begin with the adapter of another, and goes on in its folder only as it began."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_runs import lines, run_recipe
from safetensors.torch import load_file, save_file

from twinkle.errors import CheckpointError, ConfigError
from twinkle.hub.fingerprint import fingerprint
from twinkle.model import TransformersModel
from twinkle.testing import tiny_model
from twinkle_recipes.config import LoraConfig
from twinkle_recipes.run import keeper

REWARD = "def own(rows, **kwargs):\n    return [float(-sum(row['input_ids'][-4:]) % 7) for row in rows]\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    trained = TransformersModel(model_id=str(model), mixed_precision="no")
    torch.manual_seed(1)
    lora = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear", "init_lora_weights": False}
    trained.add_adapter_to_model("default", lora)
    return Path(trained.save("adapter", output_dir=str(folder)) or "")


@pytest.fixture
def values(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(keeper, "write_curve", lambda *_: None)  # a second each
    Path("rewards.py").write_text(REWARD)
    return {
        "model": {"id": str(model), "mixed_precision": "no"},
        "batch_size": 2,
        "max_steps": 2,
        "save_every": 1,
        "eval_every": 0,
        "data": {"args": {"size": 8, "difficulty": 1, "language": "en"}, "max_length": 256, "eval_fraction": 0},
        "trackers": ["JsonlTracker"],
    }


def policy(values: dict[str, Any]) -> dict[str, Any]:
    return values | {
        "data": {"args": {"size": 8, "digits": 1}, "max_length": 256, "eval_fraction": 0},
        "sampling": {"num_generations": 2, "max_tokens": 4},
        "rewards": [{"name": "./rewards.py:own"}],
    }


@pytest.mark.full
def test_preferences_are_learnt_from_an_adapter_which_is_the_reference_too(
    values: dict[str, Any], adapter: Path
) -> None:
    first = {"lora": {"init_from": str(adapter)}, "optimizer": {"lr": 1e-3}}
    folder, _ = run_recipe("dpo", values | first)
    fresh, _ = run_recipe("dpo", values | {"optimizer": {"lr": 1e-3}}, max_steps=1)
    before, after = lines(folder)
    assert before["rewards/margins"] == pytest.approx(0, abs=1e-6)  # the policy is its reference
    assert before["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert abs(after["rewards/margins"]) > 1e-5
    assert before["grad_norm"] != pytest.approx(lines(fresh)[0]["grad_norm"], rel=1e-3)
    result, start = (
        load_file(folder / "adapter/adapter_model.safetensors"),
        load_file(adapter / "adapter_model.safetensors"),
    )
    assert {name: tensor.shape for name, tensor in result.items()} == {name: t.shape for name, t in start.items()}
    assert 0 < max(float((result[name] - start[name]).abs().max()) for name in start) < 0.01
    cached, _ = run_recipe("dpo", values | first, reference={"cache": True})
    assert lines(cached)[1]["loss"] == pytest.approx(after["loss"], abs=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("weights", ["shared", "own"])
def test_a_policy_begins_with_an_adapter_and_stays_near_to_it(
    values: dict[str, Any], adapter: Path, weights: str
) -> None:
    config = policy(values) | {"lora": {"init_from": str(adapter)}, "loss": {"args": {"beta": 0.1}}, "seed": 3}
    config["optimizer"] = {"lr": 0.01}
    config["sampling"] |= {"weights": weights, "merge_and_sync": False}
    folder, _ = run_recipe("grpo", config)
    first, second = lines(folder)
    assert first["kl"] == pytest.approx(0, abs=1e-6)  # to the model without an adapter it would not be
    assert first["approx_kl"] == pytest.approx(0, abs=1e-6)  # the sampler drew with it
    assert second["kl"] > 1e-6
    again, _ = run_recipe("grpo", config, resume_from=str(folder / "checkpoints" / "step-1"))
    assert lines(again)[-1]["kl"] == second["kl"]


@pytest.mark.full
def test_an_adapter_that_was_trained_on_is_not_gone_on_with(
    values: dict[str, Any], adapter: Path, tmp_path: Path
) -> None:
    mine = shutil.copytree(adapter, tmp_path / "mine")
    config = values | {"lora": {"init_from": str(mine)}, "max_steps": 1}
    folder, _ = run_recipe("dpo", config)
    run_recipe("dpo", config, resume_from=str(folder))
    file = mine / "adapter_model.safetensors"
    save_file({name: tensor + 0.1 for name, tensor in load_file(file).items()}, file)
    with pytest.raises(ConfigError, match=r"file of the adapter .*mine has been changed"):
        run_recipe("dpo", config, resume_from=str(folder))


def test_random_bytes_in_the_adapter_to_begin_with_are_refused(
    values: dict[str, Any], adapter: Path, tmp_path: Path
) -> None:
    mine = shutil.copytree(adapter, tmp_path / "mine")
    file = mine / "adapter_model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-64:] = random.Random(2).randbytes(64)
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors was changed since it was saved"):
        run_recipe("dpo", values | {"lora": {"init_from": str(mine)}, "max_steps": 1})


def test_a_model_that_was_changed_is_not_gone_on_with(values: dict[str, Any], tmp_path: Path) -> None:
    model = shutil.copytree(values["model"]["id"], tmp_path / "model")
    config = values | {"model": {**values["model"], "id": str(model)}}
    config |= {"max_steps": 1}
    folder, _ = run_recipe("dpo", config)
    (recorded,) = json.loads((folder / "plugins.json").read_text())["models"]
    assert recorded == {"id": str(model), "fingerprint": fingerprint(model), "commit": ""}
    weights = model / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-64:] = random.Random(2).randbytes(64)
    weights.write_bytes(raw)
    said = rf"fingerprint was {recorded['fingerprint']}, and is {fingerprint(model)} now; .*--lora.init_from {folder}"
    with pytest.raises(ConfigError, match=said):
        run_recipe("dpo", config, resume_from=str(folder))
    with pytest.raises(CheckpointError, match="its adapter was trained on"):
        run_recipe("dpo", config, resume_from=str(folder / "checkpoints" / "step-1"))


def test_an_adapter_has_its_own_rank(adapter: Path) -> None:
    with pytest.raises(ValueError, match="determines rank, dropout; remove these keys"):
        LoraConfig(init_from=str(adapter), rank=8, dropout=0.1)
    assert LoraConfig.model_validate(LoraConfig(init_from="x").model_dump()).init_from == "x"


def test_a_run_of_another_recipe_says_what_can_be_begun_with(values: dict[str, Any], tmp_path: Path) -> None:
    folder, _ = run_recipe("dpo", values, max_steps=1)
    for place in (folder, folder / "checkpoints" / "step-1"):
        with pytest.raises(ConfigError, match=r"is of the recipe 'dpo'.*--lora.init_from .*adapter"):
            run_recipe("embedding", values, resume_from=str(place))


@pytest.mark.full
def test_a_reward_that_was_changed_is_not_gone_on_with(values: dict[str, Any]) -> None:
    config = policy(values)
    folder, _ = run_recipe("grpo", config)
    Path("rewards.py").write_text(REWARD.replace("% 7", "% 5"))
    with pytest.raises(ConfigError, match=r"file of the reward ./rewards.py:own has been changed"):
        run_recipe("grpo", config, resume_from=str(folder))
    run_recipe("grpo", config, resume_from=str(folder / "checkpoints" / "step-1"))  # which is another run
    Path("rewards.py").write_text(REWARD)
    run_recipe("grpo", config, resume_from=str(folder))
    assert len(lines(folder)) == 2


@pytest.mark.full
def test_a_name_alone_stands_for_a_mapping(values: dict[str, Any]) -> None:
    config = policy(values) | {"rewards": ["./rewards.py:own"], "loss": "GSPOLoss", "max_steps": 1}
    folder, _ = run_recipe("grpo", config)
    assert lines(folder)[0]["reward"] > 0
    assert "name: GSPOLoss" in (folder / "config.yaml").read_text()


def test_one_answer_has_nobody_to_be_compared_with(values: dict[str, Any]) -> None:
    config = policy(values)
    config["sampling"] |= {"num_generations": 1}
    for name in ("GRPOAdvantage", "twinkle-rewards/GRPOAdvantage"):
        with pytest.raises(ValueError, match="compares the answers to a prompt with each other"):
            run_recipe("grpo", config, advantage={"name": name})
    alone = {"name": "ReinforcePlusPlusAdvantage", "scale": "batch", "args": {"baseline": False}}
    folder, _ = run_recipe("grpo", config, advantage=alone, max_steps=1)
    assert lines(folder)[0]["grad_norm"] > 0
