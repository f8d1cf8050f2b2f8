"""Every form of a per-row argument ends at the same positions; everything else is refused with its row and lengths."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle.errors import ArgumentError, DataError
from twinkle_torch.trained import Trained

LABELS = torch.tensor([[5, -100, 6, -100, -100], [-100, 7, 8, 9, -100], [-100, -100, -100, -100, -100]])
MASK = LABELS != -100
REAL = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
LIKE = torch.zeros(3, 5, dtype=torch.float64)
WANTED = torch.tensor([[1.0, 0, 2, 0, 0], [0, 3, 4, 5, 0], [0, 0, 0, 0, 0]], dtype=torch.float64)
WHOLE = torch.tensor([[1, 9, 2, 9, 9], [9, 3, 4, 5, 9], [9, 9, 9, 9, 9]], dtype=torch.float32)


def where(**more: Any) -> Trained:
    return Trained.of({"labels": LABELS, **more}, LIKE, -100, object())


@pytest.mark.parametrize(
    "value",
    [
        WHOLE,
        WHOLE.tolist(),
        WHOLE.numpy(),
        torch.cat([WHOLE, WHOLE], dim=1),
        torch.cat([WHOLE, WHOLE], dim=1).tolist(),
        WHOLE.masked_fill(~MASK, float("nan")),
        WHOLE.masked_fill(~MASK, -200.0).requires_grad_(),
        [[1, 2], [3, 4, 5], []],
        [torch.tensor([1.0, 2.0]), np.array([3.0, 4.0, 5.0]), ()],
        [WHOLE[0], [3, 4, 5], [9] * 7],
    ],
    ids=lambda value: type(value).__name__,
)
def test_numbers_stand_at_the_trained_positions_in_order(value: Any) -> None:
    found = where().align("old_logps", value, LIKE)
    torch.testing.assert_close(found, WANTED, rtol=0, atol=0)
    assert found.dtype == torch.float64
    assert not found.requires_grad


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([2.0, 3.0, 4.0]),
        torch.tensor([[2], [3], [4]]),
        [2, 3.0, 4],
        [[2.0], [3.0], [4.0]],
        np.array([2.0, 3.0, 4.0]),
        [torch.tensor(2.0), [3], np.float64(4)],
    ],
    ids=lambda value: type(value).__name__,
)
def test_one_number_a_row_stands_at_each_of_its_trained_positions(value: Any) -> None:
    wanted = MASK * torch.tensor([[2.0], [3.0], [4.0]], dtype=torch.float64)
    torch.testing.assert_close(where().align("advantages", value, LIKE), wanted, rtol=0, atol=0)


def test_as_many_numbers_as_the_row_has_tokens_stand_at_its_tokens() -> None:
    value = [[1, 9, 2, 9], [9, 3, 4, 5, 9], [9, 9]]
    found = where(attention_mask=REAL).align("old_logps", value, LIKE)
    torch.testing.assert_close(found, WANTED, rtol=0, atol=0)


def test_of_a_batch_padded_on_the_left_the_last_numbers_are_kept() -> None:
    real = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 1, 1]])
    wider = torch.cat([torch.full((3, 2), 9.0), WHOLE], dim=1)
    for value in (wider, wider.tolist()):
        found = where(attention_mask=real).align("ref_logps", value, LIKE)
        torch.testing.assert_close(found, WANTED, rtol=0, atol=0)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_all_forms_of_one_argument_agree(data: st.DataObject) -> None:
    rows, width = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    labels = torch.tensor(
        data.draw(
            st.lists(
                st.lists(st.sampled_from([-100, 0, 3]), min_size=width, max_size=width), min_size=rows, max_size=rows
            )
        )
    )
    like = torch.zeros(rows, width)
    full = torch.arange(1.0, rows * width + 1).reshape(rows, width)
    trained = Trained.of({"labels": labels}, like, -100, object())
    wanted = torch.where(labels != -100, full, 0)
    ragged = [row[mask != -100].tolist() for row, mask in zip(full, labels, strict=True)]
    for value in (full, full.tolist(), ragged, torch.cat([full, full], dim=1)):
        assert torch.equal(trained.align("x", value, like), wanted)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            [[1, 2], [3, 4], []],
            r"old_logps of row 1 has 2 numbers; give 3 \(its trained tokens\), 1 \(the same for all\)",
        ),
        ([[1, 2], [3, 4, 5, 6], []], r"row 1 has 4 numbers.*, or at least 5 \(the width of the batch\)"),
        ([[], [3, 4, 5], []], "row 0 has 0 numbers"),
        (torch.zeros(3, 4), "row 0 has 4 numbers"),
        ([1.0, 2.0], "has 2 entries, the batch has 3 rows; give one entry a row"),
        (torch.zeros(5), "has 5 entries, the batch has 3 rows"),
        (torch.zeros(1, 15), "has 1 entries, the batch has 3 rows"),
        (1.0, "is a float; give a tensor"),
        (torch.tensor(1.0), "is a Tensor; give a tensor"),
        ({"logps": WHOLE}, "is a dict"),
        ("abc", "is a str"),
        ([None, 1, 2], "of row 0 is None, no list of numbers"),
        (["x", 1, 2], "of row 0 is 'x', no list of numbers"),
        ([1, [2, None, 3], 2], r"of row 1 is \[2, None, 3\], no list of numbers"),
        (torch.zeros(3, 5, 1), r"of row 0 has the shape \[5, 1\]"),
        ([[[(7, -0.5)], [(8, -0.5)]], 1, 2], r"of row 0 has the shape.*entry\[0\]\[1\] for entry in sequence.logprobs"),
    ],
)
def test_anything_else_is_refused_by_row_and_length(value: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=f"object: old_logps.*{message.removeprefix('old_logps ')}"):
        where().align("old_logps", value, LIKE)


def test_the_error_names_the_tokens_of_the_row_where_they_are_known() -> None:
    with pytest.raises(ArgumentError, match=r"row 0 has 3 numbers; give 2 .*, 4 \(its tokens\)"):
        where(attention_mask=REAL).align("old_logps", [[1, 2, 3], 1, 1], LIKE)


def test_one_number_for_several_tokens_can_be_refused() -> None:
    for value in (torch.ones(3), torch.ones(3, 1), [1, 1, 1], [[1], [1], [1]]):
        with pytest.raises(ArgumentError, match="row 0 has 1 numbers; give 2"):
            where().align("ref_logps", value, LIKE, broadcast=False)


@pytest.mark.parametrize(
    "labels", [torch.zeros(3, dtype=torch.int64), torch.zeros(3, 5), torch.zeros(3, 4).long(), [[1]]]
)
def test_labels_that_are_no_tokens_are_refused(labels: Any) -> None:
    with pytest.raises(DataError, match="it needs rows with one label"):
        Trained.of({"labels": labels}, LIKE, -100, object())
