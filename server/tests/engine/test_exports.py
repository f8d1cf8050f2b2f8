"""Adapters in PEFT's files, as the engine creates them."""

import json
from pathlib import Path
from typing import Any

import pytest

from twinkle.engine import AdapterSpec
from twinkle.errors import CheckpointError
from twinkle_server.engine.exports import exported_spec

FILES = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": ["q_proj"]}


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, {"targets": ("q_proj",)}),
        ({"target_modules": r".*\.q_proj"}, {"targets": r".*\.q_proj"}),
        ({"use_rslora": True, "exclude_modules": ["x"]}, {"targets": ("q_proj",), "rslora": True, "exclude": ("x",)}),
        ({"rank_pattern": {"q": 2}}, {"targets": ("q_proj",), "rank_pattern": (("q", 2),)}),
        ({"target_parameters": ["experts.down_proj"]}, {"train_attn": False}),
    ],
)
def test_a_configuration_of_peft_is_a_specification(tmp_path: Path, more: Any, expected: Any) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(FILES | more))
    shape = AdapterSpec(1, 7, train_attn=False)
    assert exported_spec(tmp_path, shape) == AdapterSpec(4, 7, 8.0, **{"train_attn": False, **expected})


def test_a_folder_without_one_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="adapter_config"):
        exported_spec(tmp_path, AdapterSpec(1))
