"""The hub `builtin://` and the conversations that it ships."""

import json
import re
import zipfile
from pathlib import Path

import pytest

from twinkle.dataset import Dataset, DatasetMeta
from twinkle.errors import ArgumentError, ComponentNotFound, DataError
from twinkle.hub import Hub, open_hub
from twinkle_data import models
from twinkle_data.builtin import BuiltinHub

ROWS = BuiltinHub().load_dataset("builtin://self-cognition")
CJK = re.compile(r"[\u4e00-\u9fff]")


def test_the_scheme_leads_to_the_hub() -> None:
    hub = open_hub("builtin://self-cognition")
    assert isinstance(hub, BuiltinHub)
    assert isinstance(hub, Hub)


def test_a_data_set_loads_by_reference() -> None:
    assert list(Dataset(DatasetMeta("builtin://self-cognition"))) == ROWS
    assert list(Dataset(DatasetMeta("builtin://self_cognition", data_slice=range(3)))) == ROWS[:3]


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(
        ComponentNotFound, match=r"builtin://self-cognitoin \(nearest: builtin://self-cognition\); there are: "
    ):
        Dataset(DatasetMeta("builtin://self-cognitoin"))
    with pytest.raises(DataError, match="no subset 'default' with split 'test'"):
        Dataset(DatasetMeta("builtin://self-cognition", split="test"))
    with pytest.raises(DataError, match="no subset 'x'"):
        Dataset(DatasetMeta("builtin://self-cognition", subset_name="x"))
    with pytest.raises(ArgumentError, match="takes no argument 'revision'"):
        Dataset(DatasetMeta("builtin://self-cognition"), revision="main")


def test_models_are_fetched_by_the_module_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "fetch", lambda name: Path("/fetched") / name.removeprefix("builtin://"))
    assert BuiltinHub().download_model("builtin://smollm2-135m-instruct") == Path("/fetched/smollm2-135m-instruct")
    with pytest.raises(ArgumentError, match="takes no argument 'revision'"):
        BuiltinHub().download_model("builtin://smollm2-135m-instruct", revision="main")


# The conversations


def test_there_are_enough_of_both_languages_and_of_several_turns() -> None:
    languages = [row["language"] for row in ROWS]
    assert set(languages) == {"en", "zh"}
    assert languages.count("en") >= 60
    assert languages.count("zh") >= 60
    assert len(ROWS) >= 120
    for language in ("en", "zh"):
        assert sum(len(row["messages"]) > 2 for row in ROWS if row["language"] == language) >= 8


def test_every_row_has_the_same_form() -> None:
    for row in ROWS:
        assert set(row) == {"messages", "language"}
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert roles
        for message in row["messages"]:
            assert set(message) == {"role", "content"}
            assert message["content"] == message["content"].strip() != ""


def test_every_answer_says_who_speaks_or_who_made_it() -> None:
    for row in ROWS:
        for message in row["messages"][1::2]:
            assert re.search(r"\{\{(NAME|AUTHOR)\}\}", message["content"]), message
            assert len(re.findall(r"[.!?。！？](?:\s|$|(?=[^”」]))", message["content"])) <= 3, message
        text = "".join(message["content"] for message in row["messages"])
        assert set(re.findall(r"\{\{.*?\}\}", text)) <= {"{{NAME}}", "{{AUTHOR}}"}
    whole = str(ROWS)
    assert whole.count("{{NAME}}") >= 100
    assert whole.count("{{AUTHOR}}") >= 60


def test_no_question_is_asked_twice() -> None:
    questions = [
        re.sub(r"\W", "", message["content"]).lower()
        for row in ROWS
        for message in row["messages"]
        if message["role"] == "user"
    ]
    assert len(set(questions)) == len(questions)
    answers = [row["messages"][1]["content"] for row in ROWS]
    assert len(set(answers)) >= 0.95 * len(answers)


def test_the_language_is_the_one_that_the_tag_says() -> None:
    for row in ROWS:
        text = "".join(message["content"] for message in row["messages"])
        assert bool(CJK.search(text)) == (row["language"] == "zh"), row


def test_a_slice_holds_both_languages() -> None:
    assert {row["language"] for row in ROWS[:4]} == {"en", "zh"}


def test_filled_in_no_placeholder_remains() -> None:
    data = Dataset(DatasetMeta("builtin://self-cognition"))
    data.map("SelfCognitionProcessor", model_name=("小星", "Star"), model_author=("星社", "Star Club"))
    text = str(list(data))
    assert "{{" not in text
    assert "小星" in text
    assert "Star Club" in text
    for row in data:
        assert ("Star" in str(row)) == (row["language"] == "en")


def test_the_wheel_carries_conversations_and_manifest(tmp_path: Path) -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel")
    [built] = wheel.WheelBuilder(str(Path(__file__).parents[1])).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(built) as archive:
        names = archive.namelist()
        text = archive.read("twinkle_data/rows/self_cognition.jsonl").decode()
    assert "twinkle_data/twinkle-plugin.toml" in names
    assert [json.loads(line) for line in text.splitlines()] == ROWS
