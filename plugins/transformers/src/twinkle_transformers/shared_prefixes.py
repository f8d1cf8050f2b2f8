"""Prefixes that several rows share: which of them to compute once, and where the tokens of each row lie then."""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from twinkle.errors import ArgumentError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(slots=True, eq=False)
class Prefix:
    """A node of the tree of prefixes, at which rows diverge.

    Attributes:
        depth: number of tokens of the prefix.
        rows: rows that diverge from all others here.
        below: longer prefixes that begin with this one.
        limit: computing it pays off if the longest chosen prefix above it has at most this many tokens; -1 is never.
    """

    depth: int
    rows: list[int] = field(default_factory=list)
    below: list[Prefix] = field(default_factory=list)
    limit: int = -1


def choose_groups(common: Sequence[int], least: int) -> list[Prefix | None]:
    """Choose for each row the prefix that it shares, so that most tokens are saved.

    A chosen prefix costs its tokens, and `least - 1` more; a row gains the tokens of the longest chosen prefix that it
    begins with. The gain of a subtree depends only on `a`, the number of tokens of the nearest chosen prefix above it,
    and is convex in it: `max(chosen, not chosen)` of sums of such functions. So each function is stored as a few bends,
    and pairs of prefixes need not be compared.

    Args:
        common: length of the common prefix of row i and row i + 1 of the sorted rows. No row is a prefix of another.
        least: number of tokens that a group must save to be chosen, at least 1.

    Returns:
        the prefix of each of the `len(common) + 1` rows; None if it shares none. A prefix with `n` rows saves
        `(n - 1) * depth` tokens, which is at least `least`.
    """
    root = _tree(common, least)
    chosen: list[Prefix | None] = [None] * (len(common) + 1)
    open_: list[tuple[Prefix, Prefix | None]] = [(root, None)]
    while open_:
        prefix, above = open_.pop()
        nearest = prefix if (above.depth if above else 0) <= prefix.limit else above
        for row in prefix.rows:
            chosen[row] = nearest
        open_.extend((below, nearest) for below in prefix.below)
    return chosen


def _tree(common: Sequence[int], least: int) -> Prefix:
    """Return the root of the tree, the empty prefix, after computing the limits of all nodes."""
    stack: list[tuple[Prefix, _Gain]] = [(Prefix(0), _Gain())]
    for row, depth in enumerate((*common, 0)):
        if stack[-1][0].depth < depth:
            stack.append((Prefix(depth), _Gain()))
        top, gain = stack[-1]
        top.rows.append(row)
        gain.slope += 1
        while top.depth > depth:
            stack.pop()
            top.limit = gain.choose(top.depth, least)
            if stack[-1][0].depth < depth:
                stack.append((Prefix(depth), _Gain()))
            upper, sum_ = stack[-1]
            upper.below.append(top)
            sum_.add(gain)
            top, gain = upper, sum_
    return stack[0][0]


@dataclass(slots=True)
class _Gain:
    """Gain of a subtree: `base + slope * a + sum(more * max(a - bend, 0))`, convex, at integers from 0.

    Attributes:
        bends: (bend, more), ascending.
    """

    base: int = 0
    slope: int = 0
    bends: list[tuple[int, int]] = field(default_factory=list)

    def add(self, other: _Gain) -> None:
        """Add the gain of another subtree."""
        self.base += other.base
        self.slope += other.slope
        self.bends = sorted(self.bends + other.bends)

    def choose(self, depth: int, least: int) -> int:
        """Replace the gain by the maximum of it and the gain of choosing a prefix of `depth` tokens.

        Returns:
            the largest `a` at which choosing the prefix is better; -1 if it never is.
        """
        self.bends = self.bends[: bisect_left(self.bends, (depth, 0))]  # prefixes above have fewer tokens
        whole = self.base + self.slope * depth + sum(more * (depth - bend) for bend, more in self.bends)
        chosen = whole - depth - (least - 1)
        if chosen <= self.base:
            return -1
        value, slope, place, passed = self.base, self.slope, 0, 0
        for bend, more in self.bends:
            if value + slope * (bend - place) >= chosen:
                break
            value, slope, place, passed = value + slope * (bend - place), slope + more, bend, passed + 1
        limit = place + (chosen - value - 1) // slope
        first = value + slope * (limit + 1 - place) - chosen  # from the limit to the next integer
        self.base, self.slope = chosen, 0
        self.bends = [(limit, first), (limit + 1, slope - first), *self.bends[passed:]]
        return limit


@dataclass(frozen=True, slots=True, eq=False)
class PrefixPlan:
    """Arrangement of rows in a stream in which shared prefixes occur once.

    Attributes:
        pieces: tokens of each segment of the stream: (row, first position, last position + 1).
        parents: index of the segment that each segment continues, which comes before it, or -1.
        lengths: number of tokens of each segment, at least 1.
        starts: position of each segment's first token: the length of its parent, or 0.
        index: for each row int64 `[tokens of the row]`, indices of its tokens in the stream.
        saved: number of tokens of all rows minus that of the stream.
    """

    pieces: tuple[tuple[int, int, int], ...]
    parents: tuple[int, ...]
    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    index: tuple[NDArray[np.int64], ...]
    saved: int


def plan_prefixes(rows: Sequence[Any], *, least: int = 16) -> PrefixPlan:
    """Find the prefixes that rows share, and arrange the rows so that each prefix occurs once.

    A row that equals another one, or is a prefix of it, is read from that row and adds no tokens. For the others, the
    groups are optimal: no choice with one prefix per row saves more tokens after `least - 1` is subtracted for each
    group. The cost is sorting the rows, and one pass over their tree of prefixes.

    Args:
        rows: sequences of integers: lists, arrays or tensors on the CPU, all of one adapter.
        least: number of tokens that a group must save, at least 1.

    Returns:
        the plan: segments are in the order in which rows first need them, children directly after their parent.

    Raises:
        ArgumentError: there is no row, one is empty or not a sequence of integers, or `least` is below 1.
    """
    if least < 1:
        raise ArgumentError(f"plan_prefixes: least must be an integer of at least 1, got {least}")
    keys = [_key(row, number) for number, row in enumerate(rows)]
    if not keys:
        raise ArgumentError("plan_prefixes: there must be at least one row, got none")
    order = sorted(reversed(range(len(keys))), key=keys.__getitem__)  # of equal rows the first one comes last
    read_from, common = _widest(keys, order, _common(keys, order))
    left = [row for row in order if read_from[row] == row]
    prefixes = dict(zip(left, choose_groups(common, least), strict=True))
    return _laid_out([len(key) // _BYTES for key in keys], read_from, prefixes)


_BYTES = 8


def _key(row: Any, number: int) -> bytes:
    """Return the tokens as bytes; sorting by them makes rows with a common prefix adjacent, for any byte order."""
    import numpy as np

    try:
        if not hasattr(row, "dtype"):
            key = struct.pack(f"{len(row)}q", *row)  # the fastest conversion in Python that refuses floats
            what = "empty"
        else:
            tokens = np.asarray(row)
            fits = tokens.ndim == 1 and tokens.dtype.kind in "iu"
            key = tokens.astype(np.int64).tobytes() if fits else b""
            what = f"{tokens.dtype} of shape {list(tokens.shape)}"
    except (TypeError, ValueError, struct.error) as error:
        raise ArgumentError(f"row {number} must be a sequence of integers: {error}") from error
    if not key:
        raise ArgumentError(f"row {number} is {what}; a row is a sequence of integers with one token at least")
    return key


def _common(keys: Sequence[bytes], order: Sequence[int]) -> list[int]:
    """Return the length of the common prefix of each row and the next one in the order."""
    import numpy as np

    tokens = [np.frombuffer(keys[number], np.int64) for number in order]
    lengths = []
    for one, other in pairwise(tokens):
        length = min(len(one), len(other))
        differ = one[:length] != other[:length]
        first = int(differ.argmax())
        lengths.append(first if differ[first] else length)
    return lengths


def _widest(keys: Sequence[bytes], order: Sequence[int], common: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return for each row the row that it is read from, and the common lengths of the remaining rows."""
    read_from = list(range(len(keys)))
    left: list[int] = []
    nearest = None
    for place in reversed(range(len(common))):
        row, after = order[place], order[place + 1]
        nearest = common[place] if nearest is None else min(nearest, common[place])
        if common[place] * _BYTES == len(keys[row]):
            read_from[row] = read_from[after]
        else:
            left.append(nearest)
            nearest = None
    return read_from, left[::-1]


def _laid_out(lengths: Sequence[int], read_from: Sequence[int], prefixes: Mapping[int, Prefix | None]) -> PrefixPlan:
    """Arrange the remaining rows in the order of first need, directly after others of their group."""
    import numpy as np

    members: dict[Prefix, list[int]] = {}
    for row in dict.fromkeys(read_from):
        if (prefix := prefixes[row]) is not None:
            members.setdefault(prefix, []).append(row)
    pieces: list[tuple[int, int, int]] = []
    parents: list[int] = []
    indices: dict[int, NDArray[np.int64]] = {}
    end = 0
    for row in read_from:
        if row in indices:
            continue
        prefix = prefixes[row]
        shared, parent, before = 0, -1, np.arange(0)
        if prefix is not None:
            shared, parent = prefix.depth, len(pieces)
            pieces.append((row, 0, shared))
            parents.append(-1)
            before = np.arange(end, end + shared)
            end += shared
        for member in (row,) if prefix is None else members[prefix]:
            pieces.append((member, shared, lengths[member]))
            parents.append(parent)
            own = np.arange(end, end + lengths[member] - shared)
            indices[member] = np.concatenate((before, own))
            end += len(own)
    return PrefixPlan(
        pieces=tuple(pieces),
        parents=tuple(parents),
        lengths=tuple(stop - start for _, start, stop in pieces),
        starts=tuple(start for _, start, _ in pieces),
        index=tuple(indices[whole][:length] for whole, length in zip(read_from, lengths, strict=True)),
        saved=sum(lengths) - end,
    )
