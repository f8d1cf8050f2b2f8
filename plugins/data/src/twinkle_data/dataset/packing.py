"""Packs encoded rows: which rows share a pack, and what a pack of rows looks like."""

import bisect
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Number
from typing import Any

from twinkle.errors import DataError, TrainingStateError
from twinkle_torch.collate import TOKEN_KEYS

DEFAULT_CAPACITY = 2048
GROUP_ROWS = 1000


def capacity_of(template: Any) -> int:
    """Return how many tokens a pack holds: the template's `max_length`, or 2048 without a template.

    Raises:
        TrainingStateError: the template has no limit.
    """
    if template is None:
        return DEFAULT_CAPACITY
    capacity = getattr(template, "max_length", None)
    if not isinstance(capacity, int) or capacity < 1:
        raise TrainingStateError(
            f"the template's max_length is {capacity!r}, so there is no size for a pack; "
            "call set_template(..., max_length=...) with a number of tokens"
        )
    return capacity


def pack_lengths(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Divide rows into packs, best fit decreasing: each row, longest first, goes where it leaves the least room.

    Hardly ever more than 11/9 of the fewest possible packs (Johnson 1973), and nearly full ones where rows are much
    shorter than a pack. The same lengths give the same packs.

    Args:
        lengths: tokens of each row, each from 1 to `capacity`.
        capacity: tokens of a pack.

    Returns:
        The row numbers of each pack, ascending; packs in the order of their first rows.
    """
    packs: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, number of the pack), sorted
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        place = bisect.bisect_left(room, (lengths[row], -1))
        if place == len(room):
            free, pack = capacity, len(packs)
            packs.append([])
        else:
            free, pack = room.pop(place)
        packs[pack].append(row)
        bisect.insort(room, (free - lengths[row], pack))
    return sorted(map(sorted, packs))


def check_lengths(lengths: Sequence[int], capacity: int, first: int = 0) -> None:
    """Raise `DataError` that names the first row which has no tokens or does not fit into a pack."""
    for number, length in enumerate(lengths, first):
        if length < 1:
            raise DataError(f"row {number} has no tokens, so it cannot be packed; encode it first, and drop empty rows")
        if length > capacity:
            raise DataError(
                f"row {number} has {length} tokens and a pack holds {capacity}; give the template max_length={length} "
                "or more, or a truncation_strategy that shortens or drops the row"
            )


def joined(rows: Sequence[Mapping[str, Any]], numbers: Sequence[int], token_keys: Collection[str]) -> dict[str, Any]:
    """Return one row that holds the rows one after the other.

    Args:
        rows: encoded rows, each with `input_ids`.
        numbers: of the rows, for errors.
        token_keys: names whose values have one entry a token (`token_keys_of`).

    Returns:
        `input_ids`, `position_ids` (which begin at 0 with every row), and the other token keys, concatenated; `length`,
        the number of all tokens; everything else as a list with one entry a row.

    Raises:
        DataError: a row lacks a token key that others have, or has the wrong number of entries; its positions do not
            begin at 0; or its last label is trained, and so would teach the first token of its neighbour.
    """
    for row, number in zip(rows, numbers, strict=True):
        _check_row(row, number, token_keys)
    pack: dict[str, Any] = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        values = [row.get(key) for row in rows]
        if key in token_keys:
            pack[key] = [entry for value in values for entry in _entries(value)]
        elif key != "length":
            pack[key] = values
    if "position_ids" not in token_keys:
        pack["position_ids"] = [place for row in rows for place in range(len(row["input_ids"]))]
    pack["length"] = len(pack["input_ids"])
    return pack


def token_keys_of(rows: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the keys that have, in every row that has them, one number (or list of numbers) for each token."""
    keys = {key for row in rows for key, value in row.items() if value is not None}
    known = {key for key in keys if key in TOKEN_KEYS}
    for key in keys - known:
        held = [(row[key], len(row["input_ids"])) for row in rows if row.get(key) is not None]
        if all(_one_a_token(value, length) for value, length in held):
            known.add(key)
    return known


def _one_a_token(value: Any, length: int) -> bool:
    if hasattr(value, "shape"):
        return bool(value.shape) and int(value.shape[0]) == length
    return isinstance(value, Sequence) and len(value) == length and not isinstance(value, str) and _numeric(value)


def _numeric(value: Any) -> bool:
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return all(map(_numeric, value))
    return isinstance(value, Number)


def _check_row(row: Mapping[str, Any], number: int, token_keys: Collection[str]) -> None:
    length = len(row["input_ids"])
    for key in token_keys:
        size = None if row.get(key) is None else len(row[key])
        if size != length:
            problem = f"no {key!r}, which other rows have" if size is None else f"{size} entries of {key!r}"
            raise DataError(f"row {number} has {problem}, for {length} tokens; to be packed, every token needs one")
    if "labels" in token_keys and int(row["labels"][-1]) != -100:
        raise DataError(
            f"row {number}: the last label is {int(row['labels'][-1])}, but labels[i] is the target of position i, so "
            "the last one must be -100; packed, it would be learnt from the wrong row"
        )
    if "position_ids" in token_keys and int(row["position_ids"][0]) != 0:
        raise DataError(
            f"row {number}: position_ids begin at {int(row['position_ids'][0])}; packed rows are told apart by "
            "positions that begin at 0"
        )


def _entries(value: Any) -> Sequence[Any]:
    to_list: Callable[[], Any] | None = getattr(value, "tolist", None)
    entries: Sequence[Any] = value if to_list is None else to_list()
    return entries


class Fill:
    """Counts what was packed, for the log."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.rows, self.tokens, self.packs = capacity, 0, 0, 0

    def add(self, lengths: Sequence[int]) -> None:
        """Count one pack of rows of these lengths."""
        self.rows += len(lengths)
        self.tokens += sum(lengths)
        self.packs += 1

    def __str__(self) -> str:
        ratio = self.tokens / (self.packs * self.capacity) if self.packs else 0.0
        return (
            f"packed {self.rows} rows of {self.tokens} tokens into {self.packs} packs of {self.capacity}: "
            f"{ratio:.1%} full"
        )
