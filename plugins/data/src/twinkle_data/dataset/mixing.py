"""The order in which rows of several data sets are mixed: in turn, or drawn by weight with a seed."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from twinkle.errors import ArgumentError, DataError

Stopping = Literal["first_exhausted", "all_exhausted"]
STOPPING = ("first_exhausted", "all_exhausted")
T = TypeVar("T")
_DRAWN_AT_ONCE = 1000  # as `datasets.interleave_datasets` draws, so that a seed gives the same order there


@dataclass(frozen=True)
class Mix:
    """How rows of several data sets are interleaved.

    Without weights, each round takes one row of every set. With weights, a seed determines from which set each row is
    taken; the order is that of `datasets.interleave_datasets` with the same probabilities and seed.

    Attributes:
        weights: one for each set; None for rounds.
        seed: of the draws.
        stopping: `first_exhausted` ends with the shortest set (without weights, after its last complete round);
            `all_exhausted` when every set was used up, and shorter sets begin again.
    """

    weights: tuple[float, ...] | None = None
    seed: int = 42
    stopping: Stopping = "first_exhausted"

    @property
    def needs_all(self) -> bool:
        """Whether every set must be used up."""
        return self.stopping == "all_exhausted"

    def turns(self, count: int) -> Iterator[int]:
        """Yield the number of the set that each row is taken from, without end."""
        if self.weights is None:
            yield from itertools.cycle(range(count))
            return
        import numpy

        random = numpy.random.default_rng(self.seed)
        shares = numpy.asarray(self.weights) / sum(self.weights)
        while True:
            yield from map(int, random.choice(count, size=_DRAWN_AT_ONCE, p=shares))

    def places(self, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the number of the set and of its row for each row of the mixture of sets of these sizes."""
        if self.weights is None:
            rounds = max(sizes) if self.needs_all else min(sizes)
            yield from ((part, turn % sizes[part]) for turn in range(rounds) for part in range(len(sizes)))
            return
        taken = [0] * len(sizes)
        for part in self.turns(len(sizes)):
            if self._over([count >= size for count, size in zip(taken, sizes, strict=True)]):
                return
            yield part, taken[part] % sizes[part]
            taken[part] += 1

    def rows(self, sources: Sequence[Callable[[], Iterator[T]]]) -> Iterator[T]:
        """Yield the rows of the mixture of streams; the order is that of `places`.

        Args:
            sources: functions that begin to read a stream.

        Raises:
            DataError: a stream that must be read again has no rows.
        """
        readers = [_Reader(source) for source in sources]
        turns = self.turns(len(readers))
        size = 1 if self.weights is not None else len(readers)  # rounds are complete
        while True:
            parts = list(itertools.islice(turns, size))
            if self._over([reader.exhausted for reader in readers]):
                return
            yield from (readers[part].take() for part in parts)

    def _over(self, exhausted: Sequence[bool]) -> bool:
        return all(exhausted) if self.needs_all else any(exhausted)


class _Reader(Iterator[T]):
    """Reads a stream one row ahead, to know its end with its last row; begins again after it."""

    def __init__(self, source: Callable[[], Iterator[T]]) -> None:
        self._source = source
        self._rows = source()
        self._ahead: list[T] = list(itertools.islice(self._rows, 1))
        self.exhausted = not self._ahead

    def __next__(self) -> T:
        return self.take()

    def take(self) -> T:
        """Return the next row.

        Raises:
            DataError: the stream has no rows.
        """
        if not self._ahead:
            self._rows = self._source()
            self._ahead = list(itertools.islice(self._rows, 1))
            if not self._ahead:
                raise DataError("mix_dataset: a stream that has to begin again has no rows")
        row = self._ahead.pop()
        self._ahead = list(itertools.islice(self._rows, 1))
        self.exhausted = self.exhausted or not self._ahead
        return row


def checked_mix(
    count: int, interleave: bool, probabilities: Any, seed: Any, stopping_strategy: Any, default: Stopping
) -> Mix | None:
    """Return the mixture that the arguments of `mix_dataset` describe; None puts sets one after the other.

    Raises:
        ArgumentError: there is not one positive weight for each of the `count` sets, the seed or the strategy is not
            valid, or an argument has no effect without interleaving.
    """
    if not interleave:
        given = {"probabilities": probabilities, "stopping_strategy": stopping_strategy}
        if unused := [name for name, value in given.items() if value is not None]:
            raise ArgumentError(f"mix_dataset: {unused[0]} has no effect with interleave=False; leave it out")
        return None
    if stopping_strategy not in (None, *STOPPING):
        raise ArgumentError(
            f"mix_dataset: stopping_strategy must be one of {', '.join(STOPPING)}, got {stopping_strategy!r}"
        )
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ArgumentError(f"mix_dataset: seed must be an integer of at least 0, got {seed!r}")
    return Mix(_weights(probabilities, count), seed, stopping_strategy or default)


def _weights(probabilities: Any, count: int) -> tuple[float, ...] | None:
    if probabilities is None:
        return None
    weights = list(probabilities) if hasattr(probabilities, "__iter__") else [probabilities]
    numbers = [float(weight) for weight in weights if isinstance(weight, int | float) or hasattr(weight, "__float__")]
    if len(numbers) != count or len(weights) != count or not all(0 < weight < float("inf") for weight in numbers):
        raise ArgumentError(
            f"mix_dataset: probabilities must be one number above 0 for each of the {count} sets, in the order in "
            f"which they were added, got {probabilities!r}; leave out a set that no row shall come from"
        )
    return tuple(numbers)
