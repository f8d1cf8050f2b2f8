"""Configurations of adapters as published scripts give them, and regular expressions that cost little time."""

from typing import Any

import pytest
from peft import LoraConfig
from pydantic import ValidationError

from twinkle_client.types.models import _DEFAULTS, _WITHOUT_EFFECT, AdapterConfig, plain_config


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"r": 4, "target_modules": ["v_proj", "q_proj"], "task_type": "CAUSAL_LM", "bias": "none"},
        {"target_modules": r".*\.q_proj", "use_rslora": True, "init_lora_weights": "gaussian"},
        {"target_modules": "all-linear", "exclude_modules": ["lm_head"], "inference_mode": True},
        {"rank_pattern": {"q_proj": 4}, "use_dora": False, "modules_to_save": None},
    ],
)
def test_a_mapping_means_what_the_object_means(options: dict[str, Any]) -> None:
    made = [AdapterConfig(**plain_config(form)) for form in (options, LoraConfig(**options).to_dict())]
    own = AdapterConfig(**plain_config(LoraConfig(**options)))
    assert [set(one.target_modules or ()) for one in made] == [set(own.target_modules or ())] * 2
    assert [one.model_dump(exclude={"target_modules"}) for one in made] == [
        own.model_dump(exclude={"target_modules"})
    ] * 2


def test_the_defaults_are_those_of_peft() -> None:
    fields = vars(LoraConfig())
    for name, value in _DEFAULTS.items():
        assert fields.get(name, value) == value, name
    assert fields.keys() <= _DEFAULTS.keys() | _WITHOUT_EFFECT | AdapterConfig.model_fields.keys()
    for name in ("use_dora", "modules_to_save", "rank", "layers_to_transform"):
        assert plain_config({name: [1]}) == {name: [1]}, "sent, so that the service refuses it"


GOOD = (r".*\.\d+\.(self_attn|mlp)\.(q_proj|down_proj)$", "all-linear", "q_proj", r"model\.layers\.[0-3]\..*_proj")
BAD = ("(a+)+", ".*.*.*x", "(.*)*x", "(a|b)+", "a{99}", "", "(?=x)", r"\w+", "x" * 257, "a\n", "[a-z]", "a$b")


def test_expressions_for_paths_cannot_be_slow() -> None:
    for pattern in GOOD:
        assert AdapterConfig(target_modules=pattern, exclude_modules=pattern).target_modules == pattern
    for pattern in BAD:
        for field in ("target_modules", "exclude_modules"):
            with pytest.raises(ValidationError, match=r"at most two repetitions|at least 1 char|at most 256 char"):
                AdapterConfig(**{field: pattern})
