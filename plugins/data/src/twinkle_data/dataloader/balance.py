"""Deals the rows of a global batch to the data ranks so that they have about as many tokens each."""

import heapq
from collections.abc import Sequence

from twinkle.errors import DataError

Pile = tuple[int, list[int]]


def deal(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Divide rows among ranks by the largest differencing method (Karmarkar and Karp 1982).

    Every row begins as a division of its own, with one pile for each rank; the two divisions that differ most between
    their fullest and emptiest pile are laid over each other, full on empty, until one is left.

    Args:
        lengths: tokens of each row, not negative.
        ranks: how many piles there are to be.

    Returns:
        For each rank the places of its rows, ascending, at least one; ranks in the order of their first rows. The same
        lengths give the same division, so every rank can find it by itself.

    Raises:
        DataError: there are fewer rows than ranks.
    """
    if len(lengths) < ranks:
        raise DataError(f"{len(lengths)} rows cannot be dealt to {ranks} data ranks, each of which needs one")
    divisions: list[tuple[int, int, list[Pile]]] = []
    for place, length in enumerate(lengths):
        piles: list[Pile] = [(length, [place]), *((0, []) for _ in range(ranks - 1))]
        divisions.append((-length if ranks > 1 else 0, place, piles))
    heapq.heapify(divisions)
    for number in range(len(lengths), 2 * len(lengths) - 1):
        _, _, one = heapq.heappop(divisions)
        _, _, other = heapq.heappop(divisions)
        laid = [(a + b, [*rows, *more]) for (a, rows), (b, more) in zip(one, reversed(other), strict=True)]
        laid.sort(key=lambda pile: (-pile[0], pile[1]))
        heapq.heappush(divisions, (laid[-1][0] - laid[0][0], number, laid))
    return sorted(map(sorted, _without_empty([rows for _, rows in divisions[0][2]], lengths)))


def _without_empty(piles: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
    """Give each empty pile the shortest row of the fullest pile that has several, which makes no pile fuller."""
    for pile in piles:
        if not pile:
            giver = max((p for p in piles if len(p) > 1), key=lambda p: sum(lengths[row] for row in p))
            shortest = min(giver, key=lambda row: lengths[row])
            giver.remove(shortest)
            pile.append(shortest)
    return piles
