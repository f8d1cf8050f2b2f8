"""The processor that fills in who a model is."""

import pytest

from twinkle.dataset import Dataset, DatasetMeta
from twinkle.errors import ArgumentError, DataError
from twinkle.preprocessor import SelfCognitionProcessor
from twinkle_data.self_cognition import SelfCognitionProcessor as Direct


def test_it_is_found_by_name() -> None:
    assert SelfCognitionProcessor is Direct


def test_query_and_response_become_messages() -> None:
    columns = {"query": ["Are you {{NAME}}?"], "response": ["Yes, {{NAME}} by {{AUTHOR}}, {{NAME}}."], "tag": ["en"]}
    assert Direct("Star", "Us")(columns) == {
        "tag": ["en"],
        "messages": [
            [
                {"role": "system", "content": "You are a helpful assistant."},
                {"role": "user", "content": "Are you Star?"},
                {"role": "assistant", "content": "Yes, Star by Us, Star."},
            ]
        ],
    }


def test_placeholders_are_filled_everywhere_in_messages() -> None:
    message = {
        "role": "assistant",
        "content": [{"type": "text", "text": "I am {{ NAME }}"}],
        "tool_calls": [{"function": {"arguments": {"by": "{{AUTHOR}}", "n": 1}}}],
    }
    [[filled]] = Direct("Star", "Us")({"messages": [[message]]})["messages"]
    assert filled["content"] == [{"type": "text", "text": "I am Star"}]
    assert filled["tool_calls"] == [{"function": {"arguments": {"by": "Us", "n": 1}}}]
    assert "{{ NAME }}" in message["content"][0]["text"]


@pytest.mark.parametrize("column", ["language", "tag"])
def test_a_pair_gives_each_language_its_own(column: str) -> None:
    columns = {"query": ["?"] * 3, "response": ["{{NAME}}/{{AUTHOR}}"] * 3, column: ["zh", "en", "zh-CN"]}
    filled = Direct(model_name=("小星", "Star"), model_author=["我们", "Us"])(columns)["messages"]
    assert [messages[-1]["content"] for messages in filled] == ["小星/我们", "Star/Us", "小星/我们"]


def test_a_name_may_hold_anything() -> None:
    columns = {"query": ["?"], "response": ["{{NAME}}"]}
    name = r"a\1 {{AUTHOR}}"
    assert Direct(name)(columns)["messages"][0][-1]["content"] == name


def test_a_placeholder_without_a_name_is_an_error() -> None:
    columns = {"query": ["?"], "response": ["{{NAME}} by {{AUTHOR}}"]}
    with pytest.raises(DataError, match=r"{{AUTHOR}}, but no name for it; give model_author="):
        Direct("Star")(columns)
    assert Direct()({"query": ["a"], "response": ["b"]})["messages"][0][-1]["content"] == "b"


@pytest.mark.parametrize("language", [None, "fr", 3])
def test_a_pair_needs_a_language_to_choose_by(language: object) -> None:
    columns = {"query": ["?"], "response": ["{{NAME}}"], "language": [language]}
    with pytest.raises(DataError, match=r"model_name is a pair .* a row has the language"):
        Direct(("小星", "Star"))(columns)
    assert Direct("Star")(columns)["messages"][0][-1]["content"] == "Star"


@pytest.mark.parametrize("name", ["", " ", ("a",), ("a", "b", "c"), ("a", ""), 3, ("a", 1)])
def test_names_are_texts_or_pairs_of_texts(name: object) -> None:
    with pytest.raises(ArgumentError, match=r"model_name is .*; give a text, or a pair of texts \(Chinese, English\)"):
        Direct(name)


def test_rows_without_a_conversation_are_named() -> None:
    with pytest.raises(DataError, match="needs 'messages', or texts 'query' and 'response'; a row has text"):
        Direct("Star")({"text": ["x"]})
    with pytest.raises(DataError, match="needs 'messages'"):
        Direct("Star")({"query": ["x"], "response": [None]})


def test_the_published_ways_to_name_it_in_map_agree() -> None:
    rows = [{"query": "?", "response": "{{NAME}} {{AUTHOR}}"}]
    ways = [
        lambda data: data.map("SelfCognitionProcessor", model_name="Star", model_author="Us"),
        lambda data: data.map("SelfCognitionProcessor", init_args={"model_name": "Star", "model_author": "Us"}),
        lambda data: data.map(
            "twinkle-data/SelfCognitionProcessor", init_args={"model_name": "Star"}, model_author="Us"
        ),
        lambda data: data.map(SelfCognitionProcessor("Star", "Us")),
        lambda data: data.map(SelfCognitionProcessor, model_name="Star", model_author="Us"),
    ]
    for way in ways:
        data = Dataset(DatasetMeta(data=rows))
        way(data)
        assert data[0]["messages"][-1]["content"] == "Star Us"
    with pytest.raises(ArgumentError, match="unknown argument 'model_nam', nearest: 'model_name'"):
        Dataset(DatasetMeta(data=rows)).map("SelfCognitionProcessor", model_nam="Star")
