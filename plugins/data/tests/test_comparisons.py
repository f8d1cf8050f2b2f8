"""Generated preferences and paraphrases: right is right, wrong is wrong, and both are the same everywhere."""

import re
from typing import Any

import pytest

from twinkle.dataset import Dataset, DatasetMeta
from twinkle.errors import ArgumentError
from twinkle_data.arithmetic import arithmetic
from twinkle_data.comparisons import FLAWS, paraphrases, preferences
from twinkle_data.numerals import chinese, english

NAME = "builtin://arithmetic-preferences"


def numbers(text: str) -> list[int]:
    return [int(found) for found in re.findall(r"-?\d+", text)]


@pytest.mark.parametrize("flaw", FLAWS)
def test_the_chosen_answer_is_right_and_the_rejected_one_ends_with_another_number(flaw: str) -> None:
    truths = {row["question"]: row for row in arithmetic(size=300)}
    for row in preferences(size=300, flaw=flaw):
        truth = truths[row["prompt"]]
        assert row["chosen"] == truth["messages"][1]["content"]
        *working, last = row["rejected"].split("\n")
        *worked, right = row["chosen"].split("\n")
        assert working == (worked if flaw == "slip" else [])
        assert last != right
        if truth["form"] != "words":
            assert numbers(last)[-1] != int(truth["answer"])
        else:
            words = {"en": english, "zh": chinese}[truth["language"]]
            assert words(int(truth["answer"])) + "." not in last.replace("。", ".").replace("是", " ").split(" ")


def test_a_paraphrase_asks_the_same_and_the_negative_something_else_in_the_same_words() -> None:
    for row in paraphrases(size=300):
        assert row["anchor"] != row["positive"]
        assert row["expression"] in row["anchor"]
        assert row["expression"] in row["positive"]
        assert row["negative"] != row["positive"]
        frame = row["positive"].partition(row["expression"])
        assert row["negative"].startswith(frame[0])
        assert row["negative"].endswith(frame[2])
    assert all(row["negative"] != row["positive"] for row in paraphrases(size=300, difficulty=1, operations="add"))


@pytest.mark.parametrize("make", [preferences, paraphrases])
def test_more_rows_begin_with_the_same_rows_and_splits_share_none(make: Any) -> None:
    assert make(size=200, seed=3)[:49] == make(size=50, seed=3)[:49]  # the last paraphrase's negative is the first row
    asked = {row["expression"] for row in make(size=300)}
    assert asked & {row["expression"] for row in make("test", size=100)} == set()


def test_they_load_by_reference_and_become_pairs() -> None:
    data = Dataset(DatasetMeta(NAME), size=5, language="en", difficulty=1, form="digits")
    data.map("PreferenceProcessor")
    row = data[0]
    assert row["positive"]["messages"][0] == row["negative"]["messages"][0]
    assert [message["role"] for message in row["negative"]["messages"]] == ["user", "assistant"]
    assert len(Dataset(DatasetMeta("builtin://arithmetic-paraphrases", split="test"), size=7)) == 7


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(ArgumentError, match="flaw is 'typo'; it is one of guess, slip"):
        Dataset(DatasetMeta(NAME), flaw="typo")
    with pytest.raises(ArgumentError, match="size is 1; a negative needs a second problem"):
        Dataset(DatasetMeta("builtin://arithmetic-paraphrases"), size=1)
    with pytest.raises(ArgumentError, match="unknown argument 'flow', nearest: 'flaw'"):
        Dataset(DatasetMeta(NAME), flow="slip")
