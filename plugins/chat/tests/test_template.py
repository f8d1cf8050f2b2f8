"""What a template accepts, what it refuses and with which words, and how rows travel through it."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle.errors import ArgumentError, EncodeError, TwinkleError, Unsupported
from twinkle.template import Template
from twinkle.testing import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
USER = {"role": "user", "content": "question"}
ANSWER = {"role": "assistant", "content": "answer"}
ROW = {"messages": [USER, ANSWER]}


def template(**options: Any) -> Template:
    return Template(tokenizer=TOKENIZER, **options)


def trained(feature: Any) -> str:
    return str(TOKENIZER.decode([label for label in feature["labels"] if label != -100]))


# Features


def test_a_feature_holds_plain_lists_of_one_length() -> None:
    feature: Any = template().encode(ROW | {"user_data": [("id", "7")], "solution": "42"})
    size = feature["length"]
    assert feature["attention_mask"] == [1] * size
    assert feature["position_ids"] == list(range(size))
    assert len(feature["input_ids"]) == len(feature["labels"]) == size
    assert all(type(token) is int for token in feature["input_ids"] + feature["labels"])
    assert feature["messages"] is ROW["messages"]
    assert (feature["user_data"], feature["solution"]) == ([("id", "7")], "42")


def test_the_row_given_is_left_as_it_was() -> None:
    row = {"messages": [USER | {"tool_calls": None}, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}]}
    before = copy.deepcopy(row)
    template(default_system="s").encode(row)
    assert row == before


def test_keys_that_arrow_filled_with_none_do_not_count() -> None:
    padded = {"tool_calls": None, "tool_call_id": None, "reasoning_content": None, "type": None}
    row = {"messages": [USER | padded, ANSWER | padded], "tools": None, "images": None, "user_data": None}
    assert template().encode(row)["input_ids"] == template().encode(ROW)["input_ids"]


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "ans"}, {"type": "text", "text": "wer", "image_url": None}]
    row = {"messages": [USER, {"role": "assistant", "content": parts}]}
    assert template().encode(row)["input_ids"] == template().encode(ROW)["input_ids"]


def test_a_default_system_message_goes_where_there_is_none() -> None:
    system = {"role": "system", "content": "be brief"}
    with_default = template(default_system="be brief")
    assert with_default.encode(ROW)["input_ids"] == template().encode({"messages": [system, USER, ANSWER]})["input_ids"]
    own = {"messages": [system | {"content": "be long"}, USER, ANSWER]}
    assert with_default.encode(own)["input_ids"] == template().encode(own)["input_ids"]
    assert with_default.format_trajectory(ROW)["messages"] == [USER, ANSWER]
    assert with_default.format_trajectory(ROW, add_default_system=True)["messages"] == [system, USER, ANSWER]


def test_tools_reach_the_chat_template_without_arrows_none() -> None:
    shows_tools = "{{ tools | tojson if tools else 'none' }}" + TOKENIZER.chat_template
    encoder = Template(tokenizer=tiny_tokenizer(shows_tools))
    schema = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}, "b": None}}}
    feature: Any = encoder.encode(ROW | {"tools": [{"type": "function", "function": schema}]})
    text = encoder.decode(feature["input_ids"])
    assert text.startswith('[{"type": "function", "function": {"name": "f"')
    assert "null" not in text
    assert trained(feature) == "answer<|im_end|>"
    assert encoder.decode(encoder.encode(ROW | {"tools": []})["input_ids"]).startswith("none<|im_start|>")


# Rows that cannot be encoded


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"query": "a", "response": "b"},
            ["no 'messages'", "query, response", "dataset.map('QuestionProcessor', ...)", "data.preprocessor"],
        ),
        ({}, ["no 'messages'", "none"]),
        ({"messages": None}, ["no 'messages'"]),
        ({"messages": []}, ["empty", "drop the row"]),
        ({"messages": "hello"}, ["str", "list of"]),
        ({"messages": USER}, ["dict", "list of"]),
        ({"messages": ["hello"]}, ["message 0", "str"]),
        ({"messages": [USER, {"content": "x"}]}, ["message 1", "no role", "content"]),
        ({"messages": [{"from": "human", "value": "x"}]}, ["message 0", "from, value"]),
        ({"messages": [{"role": "asistant", "content": "x"}]}, ["message 0", "'asistant'", "nearest: 'assistant'"]),
        ({"messages": [{"role": 3, "content": "x"}]}, ["message 0", "3", "system, user, assistant, tool"]),
        ({"messages": [{"role": ["user"], "content": "x"}]}, ["message 0", "['user']"]),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, ["message 1", "no content", "tool_calls"]),
        ({"messages": [USER, {"role": "assistant", "content": None, "tool_calls": []}]}, ["message 1", "no content"]),
        ({"messages": [{"role": "user"}]}, ["message 0 (user)", "no content"]),
        ({"messages": [{"role": "user", "content": 3.5}]}, ["message 0 (user)", "content", "float", "string"]),
        ({"messages": [{"role": "user", "content": {"text": "x"}}]}, ["message 0 (user)", "dict"]),
        ({"messages": [USER, ANSWER | {"reasoning_content": 1}]}, ["message 1", "reasoning_content", "int"]),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, ["message 0 (user)", "surrogate", "character 0"]),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, ["message 0", "'image'", "text only"]),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, ["message 0", "NoneType"]),
        ({"messages": [USER], "images": ["a.png"]}, ["images", "multimodal"]),
        ({"messages": [USER, ANSWER], "tools": "f"}, ["tools", "str"]),
        ({"messages": [USER, ANSWER | {"tool_calls": ["f"]}]}, ["message 1", "tool_calls", "function"]),
        ({"messages": [USER, ANSWER | {"tool_calls": {"name": "f"}}]}, ["message 1", "tool_calls", "must be a list"]),
        (["a"], ["list", "dict with 'messages'"]),
    ],
)
def test_a_row_that_cannot_be_encoded_says_why_and_is_not_checked_through(row: Any, words: list[str]) -> None:
    with pytest.raises(EncodeError) as error:
        template().encode(row)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert template().check(row) is None
    with pytest.raises(EncodeError, match=r"^row 1: "):
        template().batch_encode([ROW, row])


def test_nothing_is_generated_after_an_assistants_turn() -> None:
    with pytest.raises(EncodeError, match=r"message 1, the last one, is already an assistant"):
        template().encode(ROW, add_generation_prompt=True)


def test_a_refusal_of_the_chat_template_is_quoted() -> None:
    strict = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('begin with the user!') }}{% endif %}"
    with pytest.raises(EncodeError, match="refuses this conversation: begin with the user!"):
        Template(tokenizer=tiny_tokenizer(strict)).encode({"messages": [ANSWER]})
    broken = "{{ 'a' + messages[0]['nothing']['x'] }}"
    with pytest.raises(EncodeError, match="refuses this conversation"):
        Template(tokenizer=tiny_tokenizer(broken)).encode(ROW)


def test_a_tokenizer_without_a_chat_template_says_what_to_do() -> None:
    with pytest.raises(EncodeError, match="no chat template; pass use_chat_template=False"):
        Template(tokenizer=tiny_tokenizer(None)).encode(ROW)


def test_check_returns_the_rows_that_can_be_encoded() -> None:
    rows = [ROW, {"messages": []}, {"messages": [USER]}]
    assert template().batch_check(rows) == [ROW, None, rows[2]]
    assert template().batch_check({"messages": [row["messages"] for row in rows]}) == [ROW, None, rows[2]]
    for strategy in ("raise", "delete"):
        assert template(max_length=4, truncation_strategy=strategy).check(ROW) is None
    assert template(max_length=4, truncation_strategy="split").check(ROW) is ROW


# Plain text


def test_without_a_chat_template_the_text_is_trained_as_it_is() -> None:
    feature: Any = template(use_chat_template=False).encode({"messages": [{"role": "user", "content": "<think>h"}]})
    ids = TOKENIZER("<think>h")["input_ids"]
    assert feature["input_ids"] == ids
    assert feature["labels"] == [*ids[1:], -100]
    prompt: Any = template(use_chat_template=False).encode({"messages": [USER]}, add_generation_prompt=True)
    assert set(prompt["labels"]) == {-100}


def test_without_a_chat_template_there_is_one_message() -> None:
    with pytest.raises(EncodeError, match="2 messages"):
        template(use_chat_template=False).encode(ROW)
    with pytest.raises(ArgumentError, match="default_system"):
        template(use_chat_template=False, default_system="x")


# Truncation


FULL: Any = template().encode(ROW)
SIZE = FULL["length"]


def test_rows_that_fit_are_left_whole() -> None:
    for strategy in ("raise", "left", "right", "delete"):
        assert template(max_length=SIZE, truncation_strategy=strategy).encode(ROW) == FULL
    assert template(max_length=None).encode(ROW) == FULL
    assert template(max_length=SIZE, truncation_strategy="split").encode(ROW) == [FULL]


def test_a_row_too_long_is_an_error_with_both_lengths() -> None:
    with pytest.raises(
        EncodeError, match=rf"{SIZE} tokens and max_length is {SIZE - 1}.*data.truncation in a recipe.*'right'"
    ):
        template(max_length=SIZE - 1).encode(ROW)


def test_a_prompt_too_long_is_not_to_lose_its_end() -> None:
    with pytest.raises(EncodeError, match=r"data\.truncation in a recipe\): 'delete' or 'left'$"):
        template(max_length=2).encode({"messages": ROW["messages"][:-1]}, add_generation_prompt=True)


@given(limit=st.integers(1, SIZE - 1), plain=st.booleans())
def test_cut_rows_train_only_on_tokens_they_hold(limit: int, plain: bool) -> None:
    options = {"use_chat_template": False} if plain else {}
    row: Any = {"messages": [{"role": "user", "content": "x" * SIZE}]} if plain else ROW
    whole: Any = template(**options).encode(row)
    left: Any = template(max_length=limit, truncation_strategy="left", **options).encode(row)
    right: Any = template(max_length=limit, truncation_strategy="right", **options).encode(row)
    parts: Any = template(max_length=limit, truncation_strategy="split", **options).encode(row)
    assert left["input_ids"] == whole["input_ids"][-limit:]
    assert left["labels"] == whole["labels"][-limit:]
    assert right["input_ids"] == whole["input_ids"][:limit]
    assert right["labels"] == [*whole["labels"][: limit - 1], -100]
    assert [token for part in parts for token in part["input_ids"]] == whole["input_ids"]
    for start, part in zip(range(0, SIZE, limit), parts, strict=True):
        assert part["labels"] == [*whole["labels"][start : start + part["length"] - 1], -100]
        assert part["position_ids"] == list(range(part["length"]))
        assert 0 < part["length"] <= limit


def test_delete_leaves_an_empty_row() -> None:
    feature: Any = template(max_length=3, truncation_strategy="delete").encode(ROW)
    assert feature == {**ROW, "input_ids": [], "labels": [], "attention_mask": [], "position_ids": [], "length": 0}


# Many rows


def test_lists_give_lists_and_columns_give_columns() -> None:
    rows = [ROW | {"user_data": [("n", "1")], "tag": "a"}, {"messages": [USER], "user_data": None, "tag": "b"}]
    features: Any = template().batch_encode(rows)
    assert features == [template().encode(row) for row in rows]
    columns: Any = template().batch_encode(Template.map_row_to_col(rows))
    assert columns == Template.map_row_to_col(features)
    assert columns["tag"] == ["a", "b"]
    assert Template.map_col_to_row(columns) == features


def test_split_rows_bring_their_columns_along() -> None:
    encoder = template(max_length=20, truncation_strategy="split")
    count = -(-SIZE // 20)
    columns: Any = encoder.batch_encode({"messages": [ROW["messages"]] * 2, "tag": ["a", "b"]})
    assert columns["tag"] == ["a"] * count + ["b"] * count
    assert len(columns["input_ids"]) == 2 * count
    assert len(encoder.batch_encode([ROW, ROW])) == 2 * count


def test_no_rows_give_no_rows() -> None:
    assert template().batch_encode([]) == []
    assert template().batch_encode({"messages": []}) == {}


def test_a_preference_pair_keeps_its_nesting() -> None:
    other = {"messages": [USER, ANSWER | {"content": "no"}]}
    pair = {"positive": ROW, "negative": other, "margin": 0.5}
    feature: Any = template().encode(pair)
    assert feature == {"positive": FULL, "negative": template().encode(other), "margin": 0.5}
    assert template().batch_encode({"positive": [ROW], "negative": [other], "margin": [0.5]}) == {
        key: [value] for key, value in feature.items()
    }
    assert template().check(pair) is pair


def test_a_pair_is_deleted_whole_and_errors_name_the_side() -> None:
    short = {"messages": [USER]}
    feature: Any = template(max_length=SIZE - 1, truncation_strategy="delete").encode(
        {"positive": ROW, "negative": short}
    )
    assert feature["positive"]["input_ids"] == feature["negative"]["input_ids"] == []
    assert (
        template(max_length=SIZE - 1, truncation_strategy="delete").check({"positive": short, "negative": ROW}) is None
    )
    with pytest.raises(EncodeError, match=r"^row 0: negative: 'messages' is empty"):
        template().batch_encode([{"positive": ROW, "negative": {"messages": []}}])
    with pytest.raises(EncodeError, match=r"^negative: "):
        template().encode({"positive": ROW, "negative": None})
    with pytest.raises(EncodeError, match="cannot be split"):
        template(truncation_strategy="split").encode({"positive": ROW, "negative": ROW})


# The class itself


def test_text_decodes_to_what_was_encoded() -> None:
    assert template().decode(FULL["input_ids"]).endswith("answer<|im_end|>\n")
    assert template().decode(FULL["input_ids"], skip_special_tokens=True).endswith("answer\n")
    assert template().batch_decode([[65], [66, 67]]) == [template().decode([65]), template().decode([66, 67])]


def test_the_tokenizer_is_loaded_once_from_the_model_and_again_after_pickling(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    encoder = Template(str(tmp_path), max_length=99)
    again = pickle.loads(pickle.dumps(encoder))
    assert encoder.tokenizer is encoder.tokenizer is encoder.processor
    assert len(pickle.dumps(encoder)) < 1000
    assert again.encode(ROW) == encoder.encode(ROW) == FULL
    assert again.max_length == 99


def test_a_given_tokenizer_travels_along() -> None:
    assert pickle.loads(pickle.dumps(template())).encode(ROW) == FULL


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_lenght": 5}, "'max_lenght', nearest: 'max_length'"),
        ({"truncation_strategy": "middle"}, "must be one of raise, left, right, split, delete, got 'middle'"),
        ({"max_length": 0}, "max_length must be .*, got 0"),
        ({"max_length": True}, "max_length must be .*, got True"),
        ({"max_length": "9"}, "max_length must be .*, got '9'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        template(**options)


def test_a_template_needs_a_tokenizer() -> None:
    with pytest.raises(ArgumentError, match="model_id"):
        Template()


@pytest.mark.parametrize("method", ["encode", "batch_encode", "check", "batch_check", "decode", "batch_decode"])
def test_unknown_keywords_are_refused(method: str) -> None:
    argument: Any = [[1]] if "decode" in method else [ROW]
    with pytest.raises(TypeError, match=rf"{method}.*'foo'|'foo'"):
        getattr(template(), method)(argument if "batch" in method else argument[0], foo=1)


def test_text_is_no_image() -> None:
    assert template().is_mm is False
    assert (Template.image_placeholder, Template.video_placeholder, Template.audio_placeholder) == (
        "<image>",
        "<video>",
        "<audio>",
    )
    for kind in ("image", "video", "audio"):
        with pytest.raises(Unsupported, match="text only"):
            getattr(template(), f"preprocess_{kind}s")([object()])
    assert template().get_vllm_input_ids([1, 2]) == [1, 2]
    assert template().set_mm_position_ids(FULL) is FULL


def test_errors_are_the_houses() -> None:
    assert issubclass(EncodeError, TwinkleError)
    assert issubclass(EncodeError, ValueError)
