"""The recipe `embedding` on a tiny model: groups separate, runs go on after a kill, texts that are none are told."""

import json
from pathlib import Path
from typing import Any

import pytest
from recipe_runs import check_same, killed_and_continued, lines, run_recipe

from twinkle.errors import ConfigError, EncodeError
from twinkle.testing import tiny_model
from twinkle_recipes.run import keeper


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def values(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    if "separate" not in request.node.name:
        monkeypatch.setattr(keeper, "write_curve", lambda *_: None)  # a second each
    return {
        "model": {"id": str(model), "mixed_precision": "no"},
        "data": {"args": {"size": 100, "language": "en", "difficulty": 1}, "eval_fraction": 0.16, "max_length": 128},
        "lora": {"rank": 4, "dropout": 0.1},
        "optimizer": {"lr": 0.005},
        "batch_size": 8,
        "eval_every": 10,
        "trackers": ["JsonlTracker"],
    }


@pytest.mark.full
def test_texts_that_mean_the_same_come_close_and_others_separate(values: dict[str, Any]) -> None:
    folder, summary = run_recipe("embedding", values, max_steps=20, epochs=2)
    steps = lines(folder)
    gaps = [line["pos_sim"] - line["neg_sim"] for line in steps]
    assert gaps[-1] > 0.2 > gaps[0]
    assert steps[19]["eval/pos_sim"] - steps[19]["eval/neg_sim"] > 0.2
    assert summary["eval/retrieval_accuracy"] > 0.3  # by chance one of 32
    assert steps[19]["eval/loss"] < steps[9]["eval/loss"] < steps[0]["loss"]
    for name in ("loss.png", "similarity.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_a_killed_run_goes_on_in_the_same_numbers(values: dict[str, Any]) -> None:
    place = "twinkle_transformers.model:TransformersModel.clip_grad_and_step", 4
    values = {**values, "save_every": 2, "max_steps": 5, "eval_every": 0}
    runs = killed_and_continued("embedding", values, {"whole": None, "killed": place})
    assert [json.loads(line)["step"] for line in Path("killed.left").read_text().splitlines()] == [1, 2, 3]
    check_same(runs["killed"], runs["whole"])


def texts(*rows: dict[str, Any], **keys: Any) -> dict[str, Any]:
    first = {"anchor": "one", "positive": "1", "negative": ["2", "3"]}
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (first, *rows)))
    return {"id": "rows.jsonl", "eval_fraction": 0, "max_length": 64, **keys}


def test_groups_may_have_several_negatives_or_none(values: dict[str, Any]) -> None:
    two = texts({"anchor": "two", "positive": "2", "negative": ["1"]})
    folder, _ = run_recipe("embedding", {**values, "data": two, "batch_size": 2})
    assert {"pos_sim", "neg_sim", "hard_neg_sim"} <= set(lines(folder)[0])
    folder, _ = run_recipe("embedding", {**values, "data": {**two, "negative_key": None}, "batch_size": 2})
    assert "neg_sim" in lines(folder)[0]
    assert "hard_neg_sim" not in lines(folder)[0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"anchor": "two", "negative": ["1"]}, r"row 1 \(line 2\): there is no column 'positive'"),
        ({"anchor": " ", "positive": "2", "negative": ["1"]}, "'anchor' must be a non-empty string, got ' '"),
        ({"anchor": "a", "positive": "2", "negative": [""]}, "'negative' must be a non-empty string, got ''"),
    ],
    ids=["missing", "blank", "empty"],
)
def test_texts_that_are_none_are_told_with_their_row(values: dict[str, Any], row: dict[str, Any], message: str) -> None:
    with pytest.raises(EncodeError, match=message):
        run_recipe("embedding", {**values, "data": texts(row)})


def test_a_batch_that_is_compared_whole_is_not_cut(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"micro_batch_size 3 splits a batch.*use_batch false"):
        run_recipe("embedding", values, micro_batch_size=3)
    folder, _ = run_recipe(
        "embedding", values, micro_batch_size=3, max_steps=1, loss={"args": {"use_batch": False}}, eval_every=0
    )
    assert lines(folder)[0]["loss"] > 0
