"""`builtin://sums`: right answers, splits that share no problem, and prompts that a reward can score."""

import ast
from typing import Any

import pytest

from twinkle.dataset import Dataset, DatasetMeta
from twinkle.errors import ArgumentError, DataError
from twinkle_data.sums import sums

EVERY = {"operations": ["add", "subtract", "multiply"], "operands": 3, "digits": 2}


def computed(node: Any) -> int:
    if isinstance(node, ast.Constant):
        return int(str(node.value))
    left, right = computed(node.left), computed(node.right)
    signs = {ast.Add: left + right, ast.Sub: left - right, ast.Mult: left * right}
    return signs[type(node.op)]


def problem(row: dict[str, Any]) -> tuple[Any, ...]:
    numbers = [int(word) for word in row["expression"].split()[::2]]
    sign = row["expression"].split()[1]
    return (sign, numbers[0], *sorted(numbers[1:])) if sign == "-" else (sign, *sorted(numbers))


@pytest.mark.parametrize("options", [{}, EVERY, {"digits": 5}])
def test_answers_are_right_and_prompts_hold_no_answer(options: dict[str, Any]) -> None:
    for row in sums(size=200, **options):
        assert row["answer"] == str(computed(ast.parse(row["expression"], mode="eval").body))
        assert int(row["answer"]) >= 0
        assert row["messages"] == [{"role": "user", "content": f"What is {row['expression']}?"}]
        assert [tuple(pair) for pair in row["user_data"]] == [("ground_truth", row["answer"])]
        assert len(row["expression"].split()) == 2 * options.get("operands", 2) - 1


@pytest.mark.parametrize("options", [{}, EVERY])
def test_no_problem_is_asked_twice_nor_in_both_splits(options: dict[str, Any]) -> None:
    train, test = ([problem(row) for row in sums(split, size=400, **options)] for split in ("train", "test"))
    other = {problem(row) for row in sums("test", seed=5, size=400, question="{} =", **options)}
    assert len(set(train)) == len(set(test)) == 400
    assert not set(train) & (set(test) | other)


def test_a_larger_size_begins_with_the_same_rows_and_another_seed_with_others() -> None:
    assert sums(size=50) == sums(size=80)[:50]
    assert sums(size=50, seed=1) != sums(size=50)


def test_it_is_a_data_set_of_the_house() -> None:
    rows = Dataset(DatasetMeta("builtin://sums", split="test"), size=20, digits=3, question="{} =")
    assert len(rows) == 20
    assert rows[0]["messages"][0]["content"] == f"{rows[0]['expression']} ="


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"split": "validation"}, DataError, "no split 'validation'"),
        ({"size": 0}, ArgumentError, "size is 0"),
        ({"operands": 1}, ArgumentError, "operands is 1"),
        ({"digits": 0}, ArgumentError, "digits is 0"),
        ({"seed": 1.5}, ArgumentError, "seed is 1.5"),
        ({"operations": "divide"}, ArgumentError, "operations is 'divide'"),
        ({"question": "How much?"}, ArgumentError, "question is 'How much"),
        ({"split": "test", "digits": 1, "size": 100}, DataError, "hardly more than"),
    ],
)
def test_what_it_cannot_make_is_refused(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        sums(**options)
