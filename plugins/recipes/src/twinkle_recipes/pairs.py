"""Rows in pairs: what makes a pair, and the order in which the losses want them."""

from collections.abc import Sequence
from typing import Any

from twinkle.errors import DataError
from twinkle.template.labels import IGNORE
from twinkle_recipes.rows_config import DataConfig

SIDES = ("positive", "negative")


def interleaved(pairs: Sequence[Any]) -> list[Any]:
    """Return the rows of some pairs as `[chosen, rejected, chosen, rejected, ...]`."""
    return [pair[side] for pair in pairs for side in SIDES]


def check_pairs(dataset: Any, data: DataConfig) -> None:
    """Refuse encoded rows that are no pairs, and pairs with an answer in which no token is trained.

    Raises:
        DataError: names the first such row.
    """
    for number in range(len(dataset)):
        row = dataset[number]
        missing = [side for side in SIDES if side not in row]
        if missing:
            raise DataError(
                f"data set {data.id}: row {number} has no {missing[0]!r} (it has {', '.join(sorted(row))}); a pair "
                "needs both: let data.preprocessor make them, as PreferenceProcessor does of prompt, chosen and "
                "rejected"
            )
        for side in SIDES:
            if all(label == IGNORE for label in row[side]["labels"]):
                raise DataError(
                    f"data set {data.id}: in row {number} no token of {side!r} is trained: its answer is empty, or "
                    f"lies behind max_length {data.max_length} (truncation: {data.truncation}); give a larger "
                    "data.max_length, data.truncation delete to leave such pairs out, or take the row out"
                )
