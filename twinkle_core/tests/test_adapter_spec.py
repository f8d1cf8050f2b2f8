"""`AdapterSpec` as JSON data: snapshots and logs of older versions have fewer fields."""

import json
from typing import Any

import pytest

from twinkle.engine import AdapterSpec

OLDER = {
    "rank": 4, "seed": 1, "alpha": 8.0, "dropout": 0.1, "train_attn": True, "train_mlp": True, "train_unembed": False,
    "targets": ["q_proj"],
}  # fmt: skip


def test_a_specification_without_newer_options_is_written_as_before() -> None:
    spec = AdapterSpec.from_json(OLDER)
    assert spec == AdapterSpec(4, 1, 8.0, 0.1, train_unembed=False, targets=("q_proj",))
    assert json.loads(json.dumps(spec.as_json())) == OLDER


@pytest.mark.parametrize(
    "more",
    [
        {"targets": r".*\.q_proj", "exclude": "x.*"},
        {"exclude": ("v_proj",), "rslora": True, "init": "gaussian"},
        {"targets": (), "rank_pattern": (("q", 2),)},
    ],
)
def test_all_options_survive_json(more: dict[str, Any]) -> None:
    spec = AdapterSpec(4, **more)
    assert AdapterSpec.from_json(json.loads(json.dumps(spec.as_json()))) == spec


@pytest.mark.parametrize(
    ("field", "value"), [("targets", 5), ("exclude", [1]), ("init", "pissa"), ("rslora", 1), ("rank_pattern", "q")]
)
def test_damaged_options_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(TypeError, match=field):
        AdapterSpec.from_json({**OLDER, field: value})
