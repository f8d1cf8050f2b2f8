"""The recipe `dpo` on a tiny model: margins grow, the reference stays, runs go on after a kill, bad pairs are told."""

import json
from pathlib import Path
from typing import Any

import pytest
from recipe_runs import check_same, killed_and_continued, lines, run_recipe

from twinkle.errors import ConfigError, DataError
from twinkle.testing import tiny_model
from twinkle_recipes.preference.pairs import interleaved
from twinkle_recipes.run import keeper


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def values(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    if request.node.name != "test_margins_grow_on_pairs_that_were_never_trained_on":
        monkeypatch.setattr(keeper, "write_curve", lambda *_: None)  # a second each
    return {
        "model": {"id": str(model), "mixed_precision": "no"},
        "data": {"args": {"size": 40, "language": "en", "difficulty": 1}, "eval_fraction": 0.2, "max_length": 256},
        "lora": {"rank": 4, "dropout": 0.1},
        "optimizer": {"lr": 0.01},
        "batch_size": 4,
        "eval_every": 4,
        "trackers": ["JsonlTracker"],
    }


@pytest.mark.full
def test_margins_grow_on_pairs_that_were_never_trained_on(values: dict[str, Any]) -> None:
    folder, summary = run_recipe("dpo", values)
    steps = lines(folder)
    assert [line["step"] for line in steps] == list(range(1, 9))
    assert steps[0]["rewards/margins"] == pytest.approx(0, abs=1e-6)
    assert steps[0]["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert 0.05 < steps[3]["eval/rewards/margins"] < steps[7]["eval/rewards/margins"]
    assert summary["eval/rewards/accuracies"] == 1
    for name in ("loss.png", "margin.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
        assert summary[name] == str(folder / name)
    assert Path(summary["path"]) == folder / "adapter"


@pytest.mark.full
def test_every_reference_and_every_batch_in_memory_give_the_same_run(values: dict[str, Any], model: Path) -> None:
    plain = {**values, "lora": {"rank": 4}, "max_steps": 2, "eval_every": 0, "save_every": 0}
    own, _ = run_recipe("dpo", plain)
    changes: list[dict[str, Any]] = [
        {"reference": {"id": str(model)}},
        {"reference": {"cache": True}},
        {"micro_batch_size": 3},  # which tears no pair
    ]
    for change in changes:
        other, _ = run_recipe("dpo", plain, **change)
        for one, two in zip(lines(own), lines(other), strict=True):
            assert one["loss"] == pytest.approx(two["loss"], abs=1e-6)
            assert one["rewards/margins"] == pytest.approx(two["rewards/margins"], abs=1e-5)


@pytest.mark.full
def test_of_all_parameters_a_frozen_copy_is_the_reference(values: dict[str, Any]) -> None:
    full = {**values, "lora": None, "optimizer": {"lr": 1e-3}}
    folder, summary = run_recipe("dpo", full, max_steps=3)
    cached, _ = run_recipe("dpo", full, max_steps=3, reference={"cache": True})
    assert (folder / "model" / "model.safetensors").is_file()
    assert 0.02 < lines(folder)[1]["rewards/margins"] < lines(folder)[2]["rewards/margins"]
    assert lines(cached)[2]["loss"] == pytest.approx(lines(folder)[2]["loss"], abs=1e-6)
    assert summary["path"] == str(folder / "model")


@pytest.mark.parametrize(
    "loss", ["SimPOLoss", *(pytest.param(name, marks=pytest.mark.soak) for name in ("CPOLoss", "ORPOLoss"))]
)
def test_another_loss_is_a_change_of_the_configuration(values: dict[str, Any], loss: str) -> None:
    folder, _ = run_recipe("dpo", values, max_steps=2, loss={"name": loss})
    assert lines(folder)[1]["loss"] < lines(folder)[0]["loss"]
    with pytest.raises(ConfigError, match=rf"reference.cache is set, but the loss {loss} takes no reference"):
        run_recipe("dpo", values, loss={"name": loss}, reference={"cache": True})


FULL = {"lora": None, "optimizer": {"lr": 1e-3}, "reference": {"cache": True}}


@pytest.mark.parametrize(
    "changes",
    [pytest.param({}, marks=pytest.mark.full), pytest.param(FULL, marks=pytest.mark.soak)],
    ids=["lora", "all parameters"],
)
def test_a_killed_run_goes_on_in_the_same_numbers(values: dict[str, Any], changes: dict[str, Any]) -> None:
    place = "twinkle_transformers.model:TransformersModel.clip_grad_and_step", 4
    values = {**values, **changes, "save_every": 2, "max_steps": 5, "eval_every": 0}
    runs = killed_and_continued("dpo", values, {"whole": None, "killed": place})
    assert [json.loads(line)["step"] for line in Path("killed.left").read_text().splitlines()] == [1, 2, 3]
    assert [line["step"] for line in lines(runs["killed"])] == [1, 2, 3, 4, 5]
    check_same(runs["killed"], runs["whole"])


def rows_file(*rows: dict[str, Any]) -> dict[str, Any]:
    whole = {"prompt": "one?", "chosen": "yes", "rejected": "no"}
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (whole, *rows)))
    return {"id": "rows.jsonl", "eval_fraction": 0, "max_length": 256}


def test_rows_that_are_no_pairs_are_refused(values: dict[str, Any]) -> None:
    data = rows_file({"prompt": "two?", "chosen": "yes"})
    with pytest.raises(DataError, match="rejected"):
        run_recipe("dpo", {**values, "data": data})
    Path("chat.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}) + "\n"
    )
    with pytest.raises(DataError, match=r"row 0 \(line 1\): there is no .positive.*example PreferenceProcessor"):
        run_recipe("dpo", {**values, "data": {"id": "chat.jsonl", "eval_fraction": 0, "preprocessor": None}})


def test_an_answer_of_which_nothing_is_trained_is_refused_before_the_first_step(values: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="rejected"):
        run_recipe("dpo", {**values, "data": rows_file({"prompt": "two?", "chosen": "yes", "rejected": " "})})
    long = rows_file({"prompt": "why? " * 60, "chosen": "so", "rejected": "no"})
    with pytest.raises(DataError, match=r"row 1 .line 2.: no token of 'positive' is trained.*beyond max_length 256"):
        run_recipe("dpo", {**values, "data": long})
    folder, _ = run_recipe("dpo", {**values, "data": {**long, "truncation": "delete"}, "max_steps": 1})
    assert lines(folder)[0]["step"] == 1


def test_the_chosen_row_of_each_pair_comes_first() -> None:
    pairs = [{"positive": "good", "negative": "bad"}, {"negative": "worse", "positive": "better"}]
    assert interleaved(pairs) == ["good", "bad", "better", "worse"]
