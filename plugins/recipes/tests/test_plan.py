"""The plan of a run: also what takes part though nobody names it."""

import json
from pathlib import Path

import pytest

from twinkle.errors import TwinkleError
from twinkle_recipes.config import SFTConfig
from twinkle_recipes.run.plan import check_early, make_plan


def parts(kind: str, model: str = "builtin://smollm2-135m-instruct", **data: str) -> list[tuple[str, str]]:
    """Return what the plan says of one kind: what was asked, and the plugin."""
    config = SFTConfig.model_validate({"model": {"id": model}, "data": data})
    return [(part["asked"], part["plugin"]) for part in make_plan(config)["parts"] if part["kind"] == kind]


@pytest.mark.parametrize(
    ("model", "message"),
    [("builtin://smollm", "nearest: builtin://smollm2-135m-instruct"), ("file:///no/such", "there is no /no/such")],
)
def test_a_missing_model_is_found_before_anything_is_imported(model: str, message: str) -> None:
    config = SFTConfig.model_validate({"model": {"id": model}})
    with pytest.raises(TwinkleError, match=message):
        check_early(config)
    check_early(SFTConfig.model_validate({"model": {"id": "hf://acme/needs-a-request"}}))


def test_the_models_own_metrics_are_parts_of_a_run() -> None:
    assert parts("metric") == [(name, "twinkle-metrics") for name in ("LossMetric", "Accuracy", "TrainMetric")]


def test_each_hub_that_is_asked_is_a_part_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TWINKLE_MODEL_ID_ALIASES", raising=False)
    (tmp_path / "here").mkdir()
    shipped, ours = ("builtin", "twinkle-data"), "twinkle-hub"
    assert parts("hub") == [shipped]
    assert parts("hub", "here", id="here") == []
    assert parts("hub", id="hf://acme/rows", eval_id="ms://acme/rows") == [shipped, ("hf", ours), ("ms", ours)]
    monkeypatch.setenv("TWINKLE_DEFAULT_HUB", "hf")
    assert parts("hub", "acme/model", id="here") == [("hf", ours)]
    monkeypatch.setenv("TWINKLE_MODEL_ID_ALIASES", json.dumps({"acme/model": "here"}))
    assert parts("hub", "acme/model", id="here") == []
