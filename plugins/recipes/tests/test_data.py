"""Held-out rows are fixed by their content, and batches come in groups."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle.errors import DataError
from twinkle_recipes.data import groups_of_batches, held_out_rows


def rows(count: int) -> list[dict[str, str]]:
    return [{"text": f"row {number}"} for number in range(count)]


@given(st.lists(st.integers(0, 40), min_size=2, max_size=60), st.floats(0.01, 0.6), st.integers(0, 3))
def test_no_content_is_on_both_sides(numbers: list[int], fraction: float, seed: int) -> None:
    texts = [{"text": str(number)} for number in numbers]
    try:
        chosen = set(held_out_rows(range(len(texts)), texts, fraction, seed))
    except DataError:
        return
    held_out = {texts[index]["text"] for index in chosen}
    trained = {row["text"] for index, row in enumerate(texts) if index not in chosen}
    assert held_out
    assert trained
    assert not held_out & trained


def test_the_choice_follows_the_content_not_the_order() -> None:
    texts = rows(40)
    chosen = {texts[index]["text"] for index in held_out_rows(range(40), texts, 0.1, seed=1)}
    turned = texts[::-1]
    assert {turned[index]["text"] for index in held_out_rows(range(40), turned, 0.1, seed=1)} == chosen
    assert len(chosen) == 4
    assert {texts[i]["text"] for i in held_out_rows(range(40), texts, 0.1, seed=2)} != chosen


def test_indices_are_those_given() -> None:
    assert set(held_out_rows(range(100, 110), rows(10), 0.3, 0)) <= set(range(100, 110))


@pytest.mark.parametrize("texts", [rows(1), [{"text": "same"}] * 5])
def test_rows_that_cannot_be_divided_are_refused(texts: list[dict[str, str]]) -> None:
    with pytest.raises(DataError, match="eval_fraction: 0"):
        held_out_rows(range(len(texts)), texts, 0.1, 0)


def test_groups_run_over_the_borders_of_epochs_and_the_last_may_be_smaller() -> None:
    assert list(groups_of_batches(["a", "b", "c"], 3, 2)) == [["a", "b"], ["c", "a"], ["b", "c"], ["a", "b"], ["c"]]


def test_no_batch_is_taken_before_it_is_needed() -> None:
    taken = []

    def loader() -> object:
        for batch in range(4):
            taken.append(batch)
            yield batch

    next(groups_of_batches(loader(), 1, 2))
    assert taken == [0, 1]
