"""The order of one lane: numbers run without gaps, whatever the order of arrival. Pure: no I/O, no clock of its own."""

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
FARTHEST = 4096
"""Numbers that may be missing before one that arrives; a row is written for each that never comes."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A number that others wait for.

    Attributes:
        number: that is missing.
        since: time of arrival of the oldest operation that waits for it.
        waiting: operations that wait behind it.
    """

    number: int
    since: float
    waiting: int


class Lane(Generic[T]):
    """What of a lane may run now, and what waits for which number.

    Args:
        following: the first number that is neither over nor given out.
    """

    def __init__(self, following: int = 0) -> None:
        self.following = following
        self.ready: deque[T] = deque()
        self._early: dict[int, tuple[float, T]] = {}
        self._used: set[int] = set()

    def arrive(self, number: int, item: T, now: float) -> bool:
        """Take an operation.

        Returns:
            False if its number was passed already: it was given up, or it is here.
        """
        if number < self.following or number in self._early or number in self._used:
            return False
        if number == self.following:
            self.ready.append(item)
            self.following += 1
            self._close_up()
        else:
            self._early[number] = (now, item)
        return True

    def use_up(self, number: int) -> None:
        """Say that a number needs no turn: it was refused, cancelled, or is over."""
        if number < self.following:
            return
        self._early.pop(number, None)
        self._used.add(number)
        self._close_up()

    def gap(self) -> Gap | None:
        """Return the first number that is missing, if anything waits for it."""
        if not self._early:
            return None
        return Gap(self.following, min(since for since, _ in self._early.values()), len(self._early))

    def hole(self) -> range:
        """Return the numbers before the first that waits, as far as they are not over; some of them may be used."""
        return range(self.following, min(self._early, default=self.following))

    def missing(self) -> list[int]:
        """Return the numbers that are missing before the first that waits; there may be many (see `hole`)."""
        return [number for number in self.hole() if number not in self._used]

    def give_up(self) -> list[T]:
        """Count the missing numbers before the first that waits as used.

        Returns:
            The operations that waited right behind them, which must be failed: what they stood on never came. What
            waits behind a further gap goes on waiting.
        """
        if not self._early:
            return []
        self.following = min(self._early)
        self._used = {number for number in self._used if number >= self.following}
        dropped = []
        while self.following in self._early or self.following in self._used:
            if self.following in self._early:
                dropped.append(self._early.pop(self.following)[1])
            self._used.discard(self.following)
            self.following += 1
        return dropped

    def drop_far(self, most: int) -> list[T]:
        """Take out what waits for more than so many numbers, in order; its own numbers are used, the others are not."""
        far = sorted(number for number in self._early if number - self.following > most)
        self._used.update(far)
        return [self._early.pop(number)[1] for number in far]

    def holds(self, number: int) -> bool:
        """Whether an operation waits here for the numbers before its own."""
        return number in self._early

    def drop_all(self) -> list[T]:
        """Take out everything that waits, in order; used when a lane is closed."""
        dropped = [*self.ready, *(item for _, (_, item) in sorted(self._early.items(), key=lambda entry: entry[0]))]
        self.ready.clear()
        self._used.update(self._early)
        self._early.clear()
        self._close_up()
        return dropped

    @property
    def idle(self) -> bool:
        """Whether nothing waits here."""
        return not self.ready and not self._early

    def _close_up(self) -> None:
        while True:
            if self.following in self._used:
                self._used.remove(self.following)
            elif self.following in self._early:
                self.ready.append(self._early.pop(self.following)[1])
            else:
                return
            self.following += 1
