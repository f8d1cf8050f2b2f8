"""Rewards as they come in, read once: entries, the rows and groups that they belong to, and the way back."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from twinkle.errors import ArgumentError, DataError

Rewards: TypeAlias = "Tensor | Sequence[float] | Sequence[Sequence[float]]"
EPSILON = 1e-8


@dataclass(frozen=True, slots=True)
class Entries:
    """The rewards of a call: one entry a row, or one a turn.

    Attributes:
        owner: name of the estimator, for errors.
        values: the rewards, float64 `[N]`.
        rows: the row of each entry, int64 `[N]`, ascending.
        groups: the group of each entry, int64 `[N]`.
        names: what the caller calls each group.
        alone: whether each row is a separate group because the caller gave no groups.
        turns: trained tokens of each turn of each row; None where the result is one number a row.
    """

    owner: str
    values: Tensor
    rows: Tensor
    groups: Tensor
    names: list[Hashable]
    alone: bool
    turns: list[list[int]] | None

    @property
    def count(self) -> int:
        """How many rows there are."""
        return int(self.rows[-1]) + 1 if len(self.rows) else 0

    def sums(self, values: Tensor, of: Tensor) -> Tensor:
        """Return, for each entry, the sum of `values` over the entries with the same number in `of`."""
        size = int(of.max()) + 1 if len(of) else 0
        return values.new_zeros(size).index_add_(0, of, values)[of]

    def sizes(self, of: Tensor) -> Tensor:
        """Return, for each entry, how many have the same number in `of`."""
        return self.sums(torch.ones_like(self.values), of)

    def above_least(self) -> Tensor:
        """Return the rewards less their group's smallest: what is equal in a group is exactly 0 then, and stays it."""
        size = len(self.names)
        least = self.values.new_full((size,), math.inf).scatter_reduce_(0, self.groups, self.values, "amin")
        return self.values - least[self.groups]

    def spread(self, scale: str) -> Tensor | float:
        """Return what to divide by: the sample standard deviation of group or batch, plus 1e-8; 1 for "none"."""
        if scale == "none":
            return 1.0
        if scale == "batch":
            return deviation(self.values) + EPSILON
        size = self.sizes(self.groups)
        shifted = self.above_least()
        centred = shifted - self.sums(shifted, self.groups) / size
        squares = self.sums(centred.square(), self.groups)
        return (squares / (size - 1).clamp(min=1)).sqrt() + EPSILON

    def result(self, values: Tensor) -> Tensor | list[Tensor]:
        """Return float32 `[B]`, or one tensor a row: a token has the sum over its own turn and those that follow."""
        if self.turns is None:
            return values.float()
        return [tokens.float() for tokens in self.tokens(values)]

    def tokens(self, values: Tensor) -> list[Tensor]:
        """Return one float64 tensor per row: each token has the sum over the entries of its turn and later ones."""
        turns = [[1]] * self.count if self.turns is None else self.turns
        found, start = [], 0
        for lengths in turns:
            own = values[start : start + len(lengths)]
            following = own.flip(0).cumsum(0).flip(0)
            found.append(following.repeat_interleave(torch.tensor(lengths, dtype=torch.int64)))
            start += len(lengths)
        return found


def deviation(values: Tensor) -> Tensor:
    """Return the sample standard deviation; 0 of fewer than two values, and exactly 0 of equal ones."""
    if len(values) < 2:
        return values.new_zeros(())
    return (values - values.min()).std()


def read(
    owner: object,
    rewards: Any,
    num_generations: Any = 1,
    group_ids: Any = None,
    turn_lengths: Any = None,
) -> Entries:
    """Read what an estimator was called with.

    Args:
        owner: the estimator, for errors.
        rewards: `[B]`, or B lists of rewards: one a turn with `turn_lengths`, else summed to one a row.
        num_generations: rows a group, consecutive ones.
        group_ids: the group of each row, any hashable value; None is consecutive groups.
        turn_lengths: B lists: the trained tokens of each turn.

    Raises:
        ArgumentError: an argument is of the wrong kind.
        DataError: lengths do not fit, or a reward is not finite.
    """
    name = type(owner).__name__
    rows = reward_rows(name, rewards)
    turns = None if turn_lengths is None else _turns(name, turn_lengths, [len(row) for row in rows])
    if turns is None:
        rows = [[math.fsum(row)] for row in rows]
    groups, names = _groups(name, len(rows), num_generations, group_ids)
    of_entry = torch.tensor([row for row, own in enumerate(rows) for _ in own], dtype=torch.int64)
    return Entries(
        owner=name,
        values=torch.tensor([reward for row in rows for reward in row], dtype=torch.float64),
        rows=of_entry,
        groups=torch.tensor(groups, dtype=torch.int64)[of_entry],
        names=names,
        alone=group_ids is None and num_generations == 1,
        turns=turns,
    )


def reward_rows(name: str, rewards: Any) -> list[list[float]]:
    """Return the rewards of each row as finite numbers.

    Raises:
        ArgumentError: they are no sequence of numbers, or of sequences of numbers.
        DataError: one is not finite, or a row has none.
    """
    rows = []
    for number, entry in enumerate(listed(name, "rewards", rewards)):
        row = entry if isinstance(entry, list) else [entry]
        if not row:
            raise DataError(f"{name}: row {number} has no reward; give one, 0.0 for nothing earned")
        for reward in row:
            if isinstance(reward, str) or not isinstance(reward, int | float):
                raise ArgumentError(f"{name}: the reward of row {number} is {reward!r:.60}; give a number")
            if not math.isfinite(reward):
                raise DataError(
                    f"{name}: the reward of row {number} is {reward}; give a finite number, or leave the row out (and "
                    "name the groups of the others by group_ids)"
                )
        rows.append([float(reward) for reward in row])
    return rows


def listed(name: str, what: str, values: Any) -> list[Any]:
    """Return a tensor, an array or a sequence, and what is in it, as lists.

    Raises:
        ArgumentError: it has none of these forms.
    """
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise ArgumentError(f"{name}: {what} is {values!r:.60}; give a tensor or a list with one entry a row")
    entries = [value.tolist() if hasattr(value, "tolist") else value for value in values]
    return [list(entry) if isinstance(entry, tuple) else entry for entry in entries]


def check_scale(owner: object, scale: Any, known: Sequence[str], why: str = "") -> None:
    """Raise `ArgumentError` for a scale that the estimator does not support; `why` is the advice in the message."""
    if scale not in known:
        wanted = " or ".join(repr(one) for one in known)
        raise ArgumentError(f"{type(owner).__name__}: scale is {scale!r}; it is {wanted}{why and ': ' + why}")


def _turns(name: str, turn_lengths: Any, rewards: list[int]) -> list[list[int]]:
    turns = listed(name, "turn_lengths", turn_lengths)
    if len(turns) != len(rewards):
        raise DataError(f"{name}: turn_lengths has {len(turns)} rows, there are {len(rewards)} rewards; give one a row")
    for row, (lengths, count) in enumerate(zip(turns, rewards, strict=True)):
        if not isinstance(lengths, list) or not all(isinstance(n, int) and n >= 0 for n in lengths):
            raise ArgumentError(
                f"{name}: turn_lengths of row {row} is {lengths!r:.60}; give the trained tokens of each turn"
            )
        if len(lengths) != count:
            raise DataError(f"{name}: row {row} has {count} rewards and {len(lengths)} turns; give one reward a turn")
    return turns


def _groups(name: str, rows: int, num_generations: Any, group_ids: Any) -> tuple[list[int], list[Hashable]]:
    """Return the group of each row, counted from 0, and what the caller calls each group."""
    if isinstance(num_generations, bool) or not isinstance(num_generations, int) or num_generations < 1:
        raise ArgumentError(f"{name}: num_generations is {num_generations!r}; it is a whole number from 1")
    if group_ids is None:
        if rows % num_generations:
            raise DataError(
                f"{name}: {rows} rewards are no groups of {num_generations}; num_generations must divide them, or name "
                "the group of each row by group_ids"
            )
        return [row // num_generations for row in range(rows)], list(range(rows // num_generations))
    ids = group_ids.tolist() if hasattr(group_ids, "tolist") else group_ids
    if isinstance(ids, str) or not isinstance(ids, Sequence):
        raise ArgumentError(f"{name}: group_ids is {ids!r:.60}; give a tensor or a list with one entry a row")
    ids = [one.tolist() if hasattr(one, "tolist") else one for one in ids]  # tensors hash by identity
    if len(ids) != rows:
        raise DataError(f"{name}: group_ids has {len(ids)} entries, there are {rows} rewards; give one a row")
    places: dict[Hashable, int] = {}
    try:
        groups = [places.setdefault(one, len(places)) for one in ids]
    except TypeError as error:
        raise ArgumentError(f"{name}: group_ids has an {error}; give numbers or texts") from error
    for group, identity in enumerate(places):
        if num_generations > 1 and (found := groups.count(group)) != num_generations:
            raise DataError(
                f"{name}: group {identity!r} has {found} rows, and num_generations is {num_generations}; with "
                "group_ids alone groups may have any size"
            )
    return groups, list(places)
