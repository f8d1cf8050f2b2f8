"""Preference data becomes pairs of conversations that share their prompt."""

from typing import Any

import pytest

from twinkle.dataset import Dataset, DatasetMeta
from twinkle.errors import ArgumentError, DataError
from twinkle.preprocessor import EmojiDPOProcessor, PreferenceProcessor
from twinkle.template import Template
from twinkle.testing import tiny_tokenizer


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


PAIR = {
    "positive": [{"messages": [user("Hi"), assistant("good")]}],
    "negative": [{"messages": [user("Hi"), assistant("bad")]}],
}


def test_a_prompt_and_two_answers_become_a_pair() -> None:
    columns = {"prompt": ["Hi"], "answer_zh": ["good"], "answer_en": ["bad"], "id": [1]}
    assert EmojiDPOProcessor()(columns) == PAIR
    renamed = {"q": ["Hi"], "a": ["good"], "b": ["bad"]}
    assert EmojiDPOProcessor(None, "a", "b", "q")(renamed) == PAIR
    with_system = EmojiDPOProcessor(system="Be kind.")(columns)
    assert [side[0]["messages"][0] for side in with_system.values()] == [{"role": "system", "content": "Be kind."}] * 2


@pytest.mark.parametrize(
    "columns",
    [
        {"prompt": ["Hi"], "chosen": ["good"], "rejected": ["bad"]},
        {"prompt": [[user("Hi")]], "chosen": [[assistant("good")]], "rejected": [[assistant("bad")]]},
        {"prompt": ["Hi"], "chosen": [assistant("good")], "rejected": [assistant("bad")]},
        {"chosen": [[user("Hi"), assistant("good")]], "rejected": [[user("Hi"), assistant("bad")]]},
        {"prompt": ["Hi"], "chosen": [[user("Hi"), assistant("good")]], "rejected": [[user("Hi"), assistant("bad")]]},
        {"prompt": [None], "chosen": [[user("Hi"), assistant("good")]], "rejected": [[user("Hi"), assistant("bad")]]},
        {"prompt": ["Hi"], "chosen": [[user("Hi"), assistant("good")]], "rejected": ["bad"]},
    ],
)
def test_the_usual_forms_of_preference_data_mean_the_same(columns: dict[str, list[Any]]) -> None:
    assert PreferenceProcessor()(columns) == PAIR
    data = Dataset(DatasetMeta(data=columns))
    data.map("PreferenceProcessor", remove_columns=list(columns))
    assert list(data) == [{side: values[0] for side, values in PAIR.items()}]


def test_a_system_message_goes_first_where_there_is_none() -> None:
    columns = {"prompt": ["Hi"], "chosen": ["good"], "rejected": ["bad"]}
    made = PreferenceProcessor(system="Be kind.")(columns)
    assert [message["role"] for message in made["positive"][0]["messages"]] == ["system", "user", "assistant"]
    own = {"prompt": [[{"role": "system", "content": "Own."}, user("Hi")]], "chosen": ["good"], "rejected": ["bad"]}
    assert PreferenceProcessor(system="Be kind.")(own)["negative"][0]["messages"][0]["content"] == "Own."


def test_an_answer_may_repeat_the_prompt_behind_a_system_message() -> None:
    whole = [{"role": "system", "content": "Own."}, user("Hi"), assistant("good")]
    made = PreferenceProcessor()({"prompt": ["Hi"], "chosen": [whole], "rejected": [[*whole[:2], assistant("bad")]]})
    assert made["positive"] == [{"messages": whole}]


def test_a_template_encodes_what_comes_out() -> None:
    data = Dataset(DatasetMeta(data={"prompt": ["Hi"] * 3, "chosen": ["good"] * 3, "rejected": ["bad"] * 3}))
    data.map("PreferenceProcessor", batch_size=2)
    data.set_template(Template(tokenizer=tiny_tokenizer(), loss_scale="RoleLossScale"))
    data.encode()
    for row in data:
        lengths = [side["length"] for side in (row["positive"], row["negative"])]
        assert lengths[0] == lengths[1] + 1
        assert len(row["positive"]["loss_scale"]) == lengths[0]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"prompt": ["a"], "chosen": ["b"]}, "needs the column 'rejected'; there are: prompt, chosen"),
        ({"prompt": ["a"], "chosen": [5], "rejected": ["b"]}, "row 0 of the batch: column 'chosen' is 5; it is a text"),
        ({"prompt": ["a"], "chosen": [" "], "rejected": ["b"]}, "column 'chosen' is ' '"),
        ({"prompt": ["a"], "chosen": [["x"]], "rejected": ["b"]}, r"column 'chosen' is a list: \['x'\]"),
        ({"chosen": ["a"], "rejected": ["b"]}, "gives a conversation of assistant; it needs a prompt and an answer"),
        ({"prompt": ["a"], "chosen": [[user("a")]], "rejected": ["c"]}, "gives a conversation of user; it needs"),
        (
            {"prompt": ["a"], "chosen": [[user("b"), assistant("c")]], "rejected": ["c"]},
            "'chosen' is a whole conversation that does not begin with the prompt of the column 'prompt'",
        ),
        (
            {"chosen": [[user("a"), assistant("b")]], "rejected": [[user("x"), assistant("b")]]},
            "'chosen' and 'rejected' begin with different messages; a pair answers one prompt",
        ),
    ],
)
def test_what_is_no_pair_is_named(columns: dict[str, list[Any]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        PreferenceProcessor()(columns)


def test_columns_are_named_by_text() -> None:
    with pytest.raises(ArgumentError, match="EmojiDPOProcessor: chosen_key is None; it is the name of a column"):
        EmojiDPOProcessor(chosen_key=None)
    with pytest.raises(DataError, match=r"needs the column 'answer_zh' \(nearest: 'answer'\)"):
        EmojiDPOProcessor()({"prompt": ["a"], "answer": ["b"]})
