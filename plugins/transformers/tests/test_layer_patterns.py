"""Ranks and scales of single layers, and first weights that a layer's name and the seed decide."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.utils.other import get_pattern_key
from pools import Alone, flat_of, make_rows, open_pool

from twinkle.errors import ArgumentError, CheckpointError, Unsupported
from twinkle.model import TransformersModel
from twinkle.testing import tiny_model
from twinkle_transformers.patterns import check_patterns, settle_order, value_at

LAYERS = [f"model.layers.{n}.{part}_proj" for n in (0, 1, 11) for part in ("self_attn.q", "self_attn.v", "mlp.down")]
KEYS = [
    "q_proj", "proj", "down_proj", r".*\.1\.mlp\.down_proj", "layers.1.self_attn.v_proj", "^model.layers.0.*",
    "(q|v)_proj", r"layers\.\d+\.mlp\..*", "1.self_attn.q_proj", "q_proj|v_proj", ".*_proj",
    "model.layers.11.mlp.down_proj",
]  # fmt: skip
OVERLAPPING: dict[str, Any] = {
    "r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "alpha_pattern": {"v_proj": 32, r".*_proj": 3},
    "rank_pattern": {"v_proj": 2, r".*\.1\.mlp\.down_proj": 6, ".*_proj": 5},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def test_a_key_matches_as_in_peft() -> None:
    for layer, first, second in product(LAYERS, KEYS, KEYS):
        pattern = {first: 1} | {second: 2}
        assert value_at(pattern, layer, 3) == pattern.get(get_pattern_key(list(pattern), layer), 3), (first, second)


def test_settled_patterns_mean_the_same_in_sorted_order() -> None:
    for keys in product(KEYS, KEYS):
        given = dict(zip(keys, (2, 6), strict=True)) | {"_proj": 9}
        config = LoraConfig(rank_pattern=dict(given), alpha_pattern={"q_proj": 1.5})
        settle_order(config, LAYERS)
        for layer in LAYERS:
            expected = given.get(get_pattern_key(list(given), layer), 4)
            assert config.rank_pattern.get(get_pattern_key(sorted(config.rank_pattern), layer), 4) == expected, keys
    assert config.alpha_pattern == {"q_proj": 1.5}  # what says the same in any order is left as it was given


def test_errors_name_the_field_the_key_and_the_layers() -> None:
    def check(layers: Any = LAYERS, **fields: Any) -> None:
        check_patterns("x", LoraConfig(**fields), layers)

    check(rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 0.5})
    check(None, rank_pattern={"nothing": 2})  # files may have keys for layers that they do not adapt
    for fields, words in (
        (
            {"rank_pattern": {"k_proj": 2}},
            r"rank_pattern has the key 'k_proj'.* are down_proj, q_proj, v_proj, such as",
        ),
        ({"alpha_pattern": {"q_proj": 2, "x": 1}}, r"alpha_pattern has the key 'x'"),
        ({"rank_pattern": {"(": 2}}, "not a regular expression"),
        ({"rank_pattern": {"q_proj": True}}, "integers of at least 1, got True"),
        ({"rank_pattern": {"q_proj": 2.0}}, r"integers of at least 1, got 2\.0"),
        ({"alpha_pattern": {"q_proj": float("inf")}}, "finite numbers, got inf"),
        ({"alpha_pattern": {"q_proj": "8"}}, "finite numbers, got '8'"),
    ):
        with pytest.raises(ArgumentError, match=words):
            check(**fields)
    with pytest.raises(ArgumentError, match="integers of at least 1, got 0"):
        check(None, rank_pattern={"nothing": 0})


def models(folder: Path) -> list[Any]:
    return [TransformersModel(model_id=str(folder), mixed_precision="no"), open_pool(folder)]


def test_both_models_draw_the_same_weights_of_a_layer_whatever_else_is_adapted(folder: Path) -> None:
    alone, pool = models(folder)
    for model in (alone, pool):
        model.add_adapter_to_model("some", {**OVERLAPPING, "init_lora_weights": True}, seed=7)
        model.add_adapter_to_model("one", {"r": 2, "target_modules": ["v_proj"]}, seed=7)
        model.add_adapter_to_model("other", {"r": 2, "target_modules": ["v_proj"]}, seed=8)
    some = alone.get_state_dict(adapter_name="some")
    for name, value in pool.get_state_dict(adapter_name="some").items():
        assert torch.equal(value, some[name]), name
    for model in (alone, pool):
        one, other = (model.get_state_dict(adapter_name=name) for name in ("one", "other"))
        for name, value in one.items():
            assert torch.equal(value, some[name]), name
            assert torch.equal(value, other[name]) == ("lora_B" in name), name
        first, second = (one[f"base_model.model.model.layers.{n}.self_attn.v_proj.lora_A.weight"] for n in (0, 1))
        assert not torch.equal(first, second), "two layers of the same shape"
    flat = torch.cat([value.flatten() * 64**0.5 for name, value in one.items() if "lora_A" in name])
    assert 0.9 < flat.abs().max() <= 1.0, "uniform in 1/sqrt(fan_in)"
    assert abs(float(flat.std()) - 3**-0.5) < 0.1


def test_a_seed_that_would_have_no_effect_is_refused(folder: Path, tmp_path: Path) -> None:
    model, _ = models(folder)
    for config, error, words in (
        ({"init_lora_weights": False}, Unsupported, "seed=1 needs init_lora_weights"),
        ({"target_modules": ["embed_tokens"]}, Unsupported, "embedding"),
    ):
        with pytest.raises(error, match=words):
            model.add_adapter_to_model("x", {"r": 2, "target_modules": ["q_proj"], **config}, seed=1)
        assert "x" not in model.optimizer_group
    with pytest.raises(ArgumentError, match=r"seed must be an integer, got 1\.5"):
        model.add_adapter_to_model("x", {"r": 2, "target_modules": ["q_proj"]}, seed=1.5)
    model.add_adapter_to_model("x", {"r": 2, "target_modules": ["q_proj"]}, seed=1)
    model.save("x", str(tmp_path), adapter_name="x")
    with pytest.raises(ArgumentError, match="a saved adapter has its weights"):
        model.add_adapter_to_model("y", str(tmp_path / "x"), seed=1)


@pytest.mark.full
def test_overlapping_patterns_train_as_in_peft_and_survive_their_file(folder: Path, tmp_path: Path) -> None:
    rows = make_rows(3, [9, 14], seed=2)
    for index, model in enumerate(models(folder)):
        model.add_adapter_to_model("a", {**OVERLAPPING, "init_lora_weights": False})
        peft = Alone(folder, OVERLAPPING, model.get_state_dict(adapter_name="a"))
        model.set_optimizer("AdamW", lr=1e-2, adapter_name="a")
        for _ in range(2):
            output = model.forward_backward(inputs=rows, adapter_name="a")
            expected = torch.stack(
                [torch.nn.functional.pad(peft.logps(row), (0, 14 - len(row["input_ids"]))) for row in rows]
            )
            torch.testing.assert_close(output["logps"], expected.detach(), rtol=0, atol=5e-5)
            peft.backward(rows)
            peft.step()
            model.clip_grad_and_step(adapter_name="a")
        model.save("a", str(tmp_path / str(index)), adapter_name="a", save_optimizer=True)
        config = json.loads((tmp_path / str(index) / "a" / "adapter_config.json").read_text())
        assert config["rank_pattern"]["model.layers.1.mlp.down_proj"] == 6
        other = models(folder)[index]
        other.add_adapter_to_model("a", str(tmp_path / str(index) / "a"))
        other.set_optimizer("AdamW", lr=1e-2, adapter_name="a")
        other.resume_from_checkpoint(str(tmp_path / str(index) / "a"), adapter_name="a")
        for one in (model, other):
            one.forward_backward(inputs=rows, adapter_name="a")
            one.clip_grad_and_step(adapter_name="a")
        for name, value in model.get_state_dict(adapter_name="a").items():
            assert torch.equal(value, other.get_state_dict(adapter_name="a")[name]), name
        other.add_adapter_to_model("b", {**OVERLAPPING, "alpha_pattern": {"v_proj": 31, ".*_proj": 3}})
        with pytest.raises(CheckpointError, match="was trained with alpha_pattern="):
            other.load("a", str(tmp_path / str(index)), adapter_name="b")


def test_files_with_keys_of_other_layers_are_read(folder: Path, tmp_path: Path) -> None:
    for index, model in enumerate(models(folder)):
        model.add_adapter_to_model("a", {"r": 2, "target_modules": ["q_proj"], "rank_pattern": {"q_proj": 3}})
        model.save("a", str(tmp_path / str(index)), adapter_name="a")
        path = tmp_path / str(index) / "a"
        config = json.loads((path / "adapter_config.json").read_text())
        (path / "adapter_config.json").write_text(json.dumps(config | {"rank_pattern": {"q_proj": 3, "gone": 5}}))
        (path / "digests.json").unlink()
        model.add_adapter_to_model("b", str(path))
        if index:
            assert torch.equal(flat_of(model, "b"), flat_of(model, "a"))
        with pytest.raises(ArgumentError, match="'gone', which matches none"):
            model.add_adapter_to_model("c", {"target_modules": ["q_proj"], "rank_pattern": {"q_proj": 3, "gone": 5}})
        assert "c" not in model.optimizer_group
