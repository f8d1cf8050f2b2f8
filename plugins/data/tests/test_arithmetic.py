"""The generated data set: right answers, disjoint splits, the same rows everywhere."""

import ast
import hashlib
import json
from fractions import Fraction
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle.dataset import Dataset, DatasetMeta
from twinkle.errors import ArgumentError, DataError
from twinkle_data.arithmetic import arithmetic, split_of
from twinkle_data.expressions import LEVELS, Operation, draw, key, value, written
from twinkle_data.numerals import chinese, english

ROWS = arithmetic(size=1500)
SIGNS = ("+", "-", "*", "/")


def exact(text: str) -> Fraction:
    """Compute Python's reading of an expression in fractions."""

    def walk(node: ast.AST) -> Fraction:
        if isinstance(node, ast.Constant):
            return Fraction(node.value)
        if isinstance(node, ast.UnaryOp):
            return -walk(node.operand)
        assert isinstance(node, ast.BinOp)
        left, right = walk(node.left), walk(node.right)
        known = {ast.Add: left + right, ast.Sub: left - right, ast.Mult: left * right}
        return left / right if isinstance(node.op, ast.Div) else known[type(node.op)]

    return walk(ast.parse(text, mode="eval").body)


def test_every_answer_is_what_the_expression_comes_to() -> None:
    for row in ROWS:
        assert exact(row["expression"]) == int(row["answer"]), row


def test_every_step_of_a_worked_answer_is_right_and_the_last_line_has_the_answer() -> None:
    for row in ROWS:
        question, answer = row["messages"]
        assert (question["role"], answer["role"]) == ("user", "assistant")
        assert question["content"] == row["question"]
        *lines, last = answer["content"].split("\n")
        assert len(lines) == LEVELS[row["difficulty"]].operations
        for line in lines:
            left, right = line.split(" = ")
            assert exact(left) == int(right)
        words = {"en": english, "zh": chinese}[row["language"]](int(row["answer"]))
        assert (words if row["form"] == "words" else row["answer"]) in last


def test_digits_and_stories_show_their_numbers() -> None:
    for row in ROWS:
        if row["form"] == "digits":
            assert row["expression"] in row["question"]
        if row["form"] == "story":
            left, _, right = row["expression"].split(" ")
            assert left in row["question"]
            assert right in row["question"]


def test_all_difficulties_languages_and_forms_are_there() -> None:
    kinds = {(row["difficulty"], row["language"], row["form"]) for row in ROWS}
    forms = {
        1: ("digits", "words", "story"),
        2: ("digits", "words", "story"),
        3: ("digits", "words"),
        4: ("digits", "words"),
    }
    assert kinds == {(level, lang, form) for level in forms for lang in ("en", "zh") for form in forms[level]}
    for sign in SIGNS:
        assert sum(f" {sign} " in row["expression"] for row in ROWS) > 200


def test_options_choose() -> None:
    rows = arithmetic(size=40, difficulty=[1, 2], operations="multiply", language="zh", form=("story",), seed=3)
    assert {row["difficulty"] for row in rows} == {1, 2}
    assert {(row["language"], row["form"]) for row in rows} == {("zh", "story")}
    assert all(row["expression"].split(" ")[1] == "*" for row in rows)
    assert {row["difficulty"] for row in arithmetic(size=40, form="story")} == {1, 2}


def test_no_question_is_asked_twice_and_splits_share_no_problem() -> None:
    assert len({row["question"] for row in ROWS}) == len(ROWS)
    problems = {row["expression"] for row in ROWS}
    for seed in range(3):
        held_out = {row["expression"] for row in arithmetic("test", seed=seed, size=300, difficulty=[1, 2])}
        assert problems & held_out == set()
        assert {" ".join(e.split(" ")[::-1]) for e in held_out if " + " in e} & problems == set()


def test_the_same_seed_gives_the_same_rows_on_every_machine() -> None:
    def digest(**options: Any) -> str:
        text = json.dumps(arithmetic(**options), ensure_ascii=False, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    assert digest(size=200) == digest(size=200) == DIGESTS[0]
    assert digest(size=50, seed=7, split="test") == DIGESTS[1]
    assert digest(size=200, seed=1) != DIGESTS[0]


DIGESTS = ("33d326aaa111b3e6", "062f88e8f58a6837")


def test_more_rows_begin_with_the_same_rows() -> None:
    assert arithmetic(size=300) == ROWS[:300]


def test_it_loads_by_reference_and_becomes_prompts() -> None:
    data = Dataset(DatasetMeta("builtin://arithmetic", split="test"), seed=5, size=20, language="en")
    assert list(data) == arithmetic("test", seed=5, size=20, language="en")
    prompts = Dataset(DatasetMeta("builtin://arithmetic"), size=5)
    prompts.map("QuestionProcessor")
    assert [len(row["messages"]) for row in prompts] == [1] * 5


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sede": 1}, ArgumentError, "unknown argument 'sede', nearest: 'seed'"),
        ({"seed": "1"}, ArgumentError, "seed is '1'; it is a whole number"),
        ({"seed": True}, ArgumentError, "seed is True"),
        ({"size": 0}, ArgumentError, "size is 0; it is a whole number from 1"),
        ({"difficulty": 5}, ArgumentError, "difficulty is 5; it is one or several of 1, 2, 3, 4, or None for all"),
        ({"difficulty": True}, ArgumentError, "difficulty is True"),
        ({"difficulty": []}, ArgumentError, "difficulty is a list"),
        ({"operations": "plus"}, ArgumentError, "operations is 'plus'; it is one or several of add, subtract"),
        ({"language": "fr"}, ArgumentError, "language is 'fr'"),
        ({"form": 3}, ArgumentError, "form is 3"),
        ({"form": "story", "difficulty": 3}, ArgumentError, "stories have difficulty 1 or 2, and difficulty is 3"),
        (
            {"size": 3000, "difficulty": 1, "operations": "multiply", "language": "en", "form": "digits"},
            DataError,
            "size is 3000, and split 'train' has hardly more than .* questions of this sort; ask for fewer",
        ),
    ],
)
def test_what_cannot_be_is_said(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Dataset(DatasetMeta("builtin://arithmetic"), **options)


def test_unknown_splits_and_subsets_are_named() -> None:
    with pytest.raises(DataError, match="no split 'validation'; it has train and test"):
        Dataset(DatasetMeta("builtin://arithmetic", split="validation"))
    with pytest.raises(DataError, match="no subset 'hard'; it has 'default'"):
        Dataset(DatasetMeta("builtin://arithmetic", subset_name="hard"))


@given(st.integers(0, 10**6), st.sampled_from(sorted(LEVELS)), st.sets(st.sampled_from(SIGNS), min_size=1))
@settings(max_examples=150, deadline=None)
def test_an_expression_is_written_as_it_is_computed(seed: int, level: int, signs: set[str]) -> None:
    found = draw(Random(seed), LEVELS[level], sorted(signs))
    assert exact(written(found)) == value(found)
    assert sum(sign in signs for sign in written(found).replace("(", "").split(" ")) == LEVELS[level].operations
    if not LEVELS[level].negative:
        assert value(found) >= 0


@given(st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_the_order_of_what_is_added_does_not_change_the_split(seed: int) -> None:
    found = draw(Random(seed), LEVELS[4], ("+", "*"))
    turned = Operation(found.sign, found.right, found.left)
    assert key(turned) == key(found)
    assert split_of(turned) == split_of(found)


# Numbers in words

TEENS = ("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")
TENS = ("ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
ONES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SIMPLE = {word: 10 * n for n, word in enumerate(TENS, 1)} | {word: n for n, word in enumerate((*ONES, *TEENS))}


def read_english(text: str) -> int:
    sign = -1 if text.startswith("minus ") else 1
    total = part = 0
    for word in text.removeprefix("minus ").replace("-", " ").split(" "):
        if word == "hundred":
            part *= 100
        elif word in ("thousand", "million"):
            total += part * {"thousand": 1000, "million": 10**6}[word]
            part = 0
        else:
            part += SIMPLE[word]
    return sign * (total + part)


def read_chinese(text: str) -> int:
    sign = -1 if text.startswith("负") else 1
    total = part = digit = 0
    for letter in text.removeprefix("负"):
        if letter == "万":
            total, part, digit = (part + digit) * 10**4, 0, 0
        elif letter in "十百千":
            part, digit = part + (digit or 1) * {"十": 10, "百": 100, "千": 1000}[letter], 0
        else:
            digit = "零一二三四五六七八九".index(letter)
    return sign * (total + part + digit)


@given(st.integers(-(10**8) + 1, 10**8 - 1))
@settings(max_examples=300, deadline=None)
def test_words_read_back_as_the_number(number: int) -> None:
    assert read_english(english(number)) == number
    assert read_chinese(chinese(number)) == number


@pytest.mark.parametrize(
    ("number", "en", "zh"),
    [
        (0, "zero", "零"),
        (10, "ten", "十"),
        (-12, "minus twelve", "负十二"),
        (110, "one hundred ten", "一百一十"),
        (1001, "one thousand one", "一千零一"),
        (10010, "ten thousand ten", "一万零一十"),
        (100000, "one hundred thousand", "十万"),
        (2040000, "two million forty thousand", "二百零四万"),
        (30000500, "thirty million five hundred", "三千万零五百"),
    ],
)
def test_numbers_are_said_as_people_say_them(number: int, en: str, zh: str) -> None:
    assert english(number) == en
    assert chinese(number) == zh


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="out of range"):
        english(10**8)
    with pytest.raises(ValueError, match="out of range"):
        chinese(-(10**8))
