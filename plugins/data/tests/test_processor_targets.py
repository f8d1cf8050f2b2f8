"""Rows with several targets a token become tables `[B, T, K]`; labels and weights of other shapes are refused."""

from typing import Any

import numpy as np
import pytest
import torch

from twinkle.errors import DataError
from twinkle.processor import InputProcessor

WIDE = {"input_ids": [1, 2, 3], "labels": [[2, 5], [3, -100], [4, 6]], "loss_scale": [[0.5, 0.5], [1, 0], [-1, 2.5]]}
NARROW = {"input_ids": [7, 8], "labels": [8, 9], "loss_scale": [1.0, 0.25]}


def test_rows_are_padded_to_the_longest_and_the_most_targets() -> None:
    batch: Any = InputProcessor()([WIDE, NARROW])
    assert batch["labels"].dtype is torch.int64
    assert batch["loss_scale"].dtype is torch.float32
    assert batch["labels"].tolist() == [
        [[2, 5], [3, -100], [4, 6]],
        [[8, -100], [9, -100], [-100, -100]],
    ]
    assert batch["loss_scale"].tolist() == [[[0.5, 0.5], [1, 0], [-1, 2.5]], [[1, 0], [0.25, 0], [0, 0]]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_arrays_are_read_as_lists_are(make: Any) -> None:
    rows = [{key: make(value) for key, value in WIDE.items()}]
    found, wanted = (InputProcessor()(value) for value in (rows, [WIDE]))
    for key in WIDE:
        assert found[key].tolist() == wanted[key].tolist()  # type: ignore[literal-required]


def test_the_left_side_and_no_padding_keep_the_table() -> None:
    left: Any = InputProcessor(padding_side="left")([WIDE, NARROW])
    assert left["labels"][1].tolist() == [[-100, -100], [8, -100], [9, -100]]
    packed: Any = InputProcessor(padding_free=True)([WIDE, NARROW])
    assert packed["labels"].shape == (1, 5, 2)
    assert packed["labels"][0, 3].tolist() == [8, -100]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"labels": [[2, 5], [3, 4]]}, "row 1: 'labels' is a table of 2 rows, for 3 tokens"),
        ({"loss_scale": [1, 2, 3]}, "row 1: 'labels' has several targets a token, and 'loss_scale' one weight"),
        ({"labels": [2, 3, 4]}, "row 1: 'loss_scale' has several weights a token, and 'labels' one target"),
        ({"labels": [[2, 5], [3], [4, 6]]}, "row 1: 'labels' does not hold numbers"),
        ({"labels": [[2, 0.5], [3, 4], [4, 6]]}, "row 1: 'labels' holds fractions"),
    ],
)
def test_tables_that_do_not_fit_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        InputProcessor()([NARROW, {**WIDE, **change}])
