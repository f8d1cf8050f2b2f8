"""Configurations that a pool cannot honour are refused with their adapter's name, and leave nothing behind."""

from pathlib import Path
from typing import Any

import pytest
from peft import PromptTuningConfig
from pools import lora, open_pool

from twinkle.errors import ArgumentError, Unsupported
from twinkle.testing import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


NOTHING = {"target_modules": None, "train_attn": False, "train_mlp": False, "train_unembed": False}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("config", "error", "match"),
    [
        ({"r": 0}, ArgumentError, "adapter 'x': .*r"),
        ({"r": -4}, ArgumentError, "adapter 'x': .*r"),
        ({"r": True}, ArgumentError, "rank r must be .* got True"),
        ({"r": 2.5}, ArgumentError, "rank r must be .* got 2.5"),
        ({"rank_pattern": {"q_proj": 0}}, ArgumentError, "rank_pattern"),
        ({"lora_alpha": float("nan")}, ArgumentError, "lora_alpha must be .* got nan"),
        ({"lora_dropout": 1.0}, ArgumentError, "lora_dropout must be .* got 1.0"),
        ({"lora_dropout": -0.1}, ArgumentError, "lora_dropout must be .* got -0.1"),
        ({"target_modules": ["qproj"]}, ArgumentError, "matches no layer of LlamaForCausalLM"),
        ({"target_modules": []}, ArgumentError, "matches no layer"),
        ({"target_modules": ["q_proj"], "layers_to_transform": [9]}, ArgumentError, "matches no layer"),
        ({"target_modules": ["embed_tokens"]}, Unsupported, "embed_tokens"),
        ({"target_modules": ["q_proj", "norm"]}, Unsupported, "RMSNorm"),
        ({"use_dora": True}, Unsupported, "use_dora=True"),
        ({"bias": "all"}, Unsupported, "bias='all'"),
        ({"lora_bias": True}, Unsupported, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, Unsupported, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, Unsupported, "pissa"),
        ({"layer_replication": [(0, 2), (1, 2)]}, Unsupported, "layer_replication"),
        ({"trainable_token_indices": [1]}, Unsupported, "trainable_token_indices"),
        ({"rank": 4}, ArgumentError, "rank"),
        ({"train_attn": True, "target_modules": ["q_proj"]}, ArgumentError, "not both"),
        (NOTHING, ArgumentError, "at least one of train_attn"),
        ({"seed": 1.5}, ArgumentError, "seed must be an integer, got 1.5"),
    ],
)  # fmt: skip
def test_a_configuration_that_cannot_be_honoured_is_refused(
    folder: Path, config: dict[str, Any], error: type[Exception], match: str
) -> None:
    model = open_pool(folder)
    given = {key: value for key, value in {**lora(), **config}.items() if value is not None}
    with pytest.raises(error, match=match):
        model.add_adapter_to_model("x", given)
    assert len(model.pool.tenants) == 0
    assert model.optimizer_group == {}
    model.add_adapter_to_model("x", lora())


@pytest.mark.sample(2)
@pytest.mark.parametrize("config", [PromptTuningConfig(num_virtual_tokens=2), 5, None, [("r", 4)]])
def test_what_is_no_lora_configuration_is_refused(folder: Path, config: Any) -> None:
    with pytest.raises((Unsupported, ArgumentError), match="adapter 'x'"):
        open_pool(folder).add_adapter_to_model("x", config)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["", "a b", "../x", "1x", "a.b", 5, None])
def test_names_are_letters_digits_and_dashes(folder: Path, name: Any) -> None:
    with pytest.raises(ArgumentError, match="adapter name"):
        open_pool(folder).add_adapter_to_model(name, lora())
