"""The best choice of shared prefixes: a dynamic programme over the tree of prefixes, exact and in integers."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Prefix:
    """A prefix where rows part.

    Attributes:
        depth: its tokens.
        rows: numbers of the rows that part from all others here.
        below: longer prefixes that begin with this one.
        limit: it is worth computing where the longest chosen prefix above it has at most so many tokens; -1 is never.
    """

    depth: int
    rows: list[int] = field(default_factory=list)
    below: list["Prefix"] = field(default_factory=list)
    limit: int = -1


def choose_groups(common: Sequence[int], least: int) -> list[Prefix | None]:
    """Choose for each row the prefix that it shares, so that most tokens are saved.

    A chosen prefix costs its tokens, and `least - 1` more; a row gains the tokens of the longest chosen prefix that it
    begins with. Seen from below, what a subtree gains depends on one number `a` alone, the tokens of the nearest chosen
    prefix above it, and is convex in it: `max(chosen, not chosen)` of sums of such functions. So each is kept as a few
    bends, and no pair of prefixes is ever looked at.

    Args:
        common: tokens that row i and row i + 1 of the sorted rows begin with in common. No row is the beginning of
            another.
        least: what a group must save to be chosen, in tokens, at least 1.

    Returns:
        for each of the `len(common) + 1` rows its prefix; None where it shares none. One with `n` rows saves
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
    """Return the empty prefix, below which all others hang with their limits."""
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
    """What a subtree gains: `base + slope * a + sum(more * max(a - bend, 0))`, convex, at integers from 0.

    Attributes:
        bends: (bend, more), ascending.
    """

    base: int = 0
    slope: int = 0
    bends: list[tuple[int, int]] = field(default_factory=list)

    def add(self, other: "_Gain") -> None:
        """Add another subtree's."""
        self.base += other.base
        self.slope += other.slope
        self.bends = sorted(self.bends + other.bends)

    def choose(self, depth: int, least: int) -> int:
        """Take the better of this and of choosing a prefix of `depth` tokens; return the last `a` at which that is it.

        Returns:
            -1 where it never is.
        """
        self.bends = self.bends[: bisect_left(self.bends, (depth, 0))]  # what lies above has fewer tokens
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
