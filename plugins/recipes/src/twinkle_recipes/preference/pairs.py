"""Rows in pairs: what makes a pair, and the order in which the losses want them."""

from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.data_format import IGNORE_INDEX
from twinkle.errors import EncodeError
from twinkle_recipes.config.parts import RunConfig
from twinkle_recipes.config.rows import DataConfig
from twinkle_recipes.rows.loading import encode_rows

SIDES = ("positive", "negative")


def interleaved(pairs: Sequence[Any]) -> list[Any]:
    """Return the rows of some pairs as `[chosen, rejected, chosen, rejected, ...]`."""
    return [pair[side] for pair in pairs for side in SIDES]


def encode_pairs(dataset: Any, config: RunConfig) -> None:
    """Turn pairs of conversations into tokens.

    Raises:
        EncodeError: a row is no pair, or no token of one of its answers is trained; names the first such row.
    """
    rows, data = len(dataset), config.data
    encode_rows(dataset, config)
    left = "" if len(dataset) == rows else f" of the {len(dataset)} of {rows} rows that data.truncation left"
    for number in range(len(dataset)):
        if problem := _problem(dataset[number], data):
            raise EncodeError(f"row {number}{left}: {problem}")


def _problem(row: Mapping[str, Any], data: DataConfig) -> str:
    """Return what is wrong with an encoded row, or nothing."""
    if missing := [side for side in SIDES if side not in row]:
        return (
            f"there is no {missing[0]!r} (it has {', '.join(sorted(row))}); a pair needs both: let data.preprocessor "
            "make them, as PreferenceProcessor does of prompt, chosen and rejected"
        )
    for side in SIDES:
        if all(label == IGNORE_INDEX for label in row[side]["labels"]):
            return (
                f"no token of {side!r} is trained: its answer is empty, or lies behind max_length {data.max_length} "
                f"(truncation: {data.truncation}); give a larger data.max_length, data.truncation delete to leave such "
                "pairs out, or take the row out"
            )
    return ""
