"""Contract checks of data sets: rows by index, or a stream that is repeatable with any number of workers."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from twinkle_testing.contracts.case import Case, NotApplicable, Violation, require
from twinkle_testing.contracts.values import same, shown


def _rows() -> list[dict[str, Any]]:
    return [{"text": f"row {number}", "number": number} for number in range(7)]


@dataclass(kw_only=True)
class DatasetCase(Case):
    """A data set of known rows.

    Attributes:
        make: returns the data set, if it is not built with `dataset_meta=` or `kwargs`.
        rows: its rows, in order, if known; by default seven rows, passed as `dataset_meta`.
    """

    kind = "dataset"

    make: Callable[[], Any] | None = None
    rows: Sequence[Mapping[str, Any]] | None = field(default=None)

    def build(self, **more: Any) -> Any:
        """Return the data set."""
        if self.make is not None and not more:
            return self.make()
        if self.is_class and not self.kwargs and "dataset_meta" in inspect.signature(self.component).parameters:
            from twinkle.dataset import DatasetMeta

            return super().build(dataset_meta=DatasetMeta(data=_rows()), **more)
        return super().build(**more)

    def expected(self) -> list[dict[str, Any]] | None:
        """Return the expected rows, if known."""
        if self.rows is not None:
            return [dict(row) for row in self.rows]
        return None if self.make or self.kwargs or not self.is_class else _rows()

    def sized(self) -> Any:
        """Return the data set if it has rows by index."""
        from twinkle.dataset.protocol import StreamLike

        found = self.build()
        if isinstance(found, StreamLike):
            raise NotApplicable("it is a stream")
        return found

    def stream(self) -> Any:
        """Return the data set if it is a stream."""
        from twinkle.dataset.protocol import StreamLike

        found = self.build()
        if not isinstance(found, StreamLike):
            raise NotApplicable("it is not a stream")
        return found


def rows_by_number(case: DatasetCase) -> None:
    """It has a length and a row for each index below it; the rows equal the expected ones, if given."""
    dataset = case.sized()
    length = len(dataset)
    require(length > 0, "it is empty; give rows in its example")
    found = [dataset[number] for number in range(length)]
    expected = case.expected()
    require(
        expected is None or same(found, expected),
        f"its rows are {shown(found, 300)}; expected are {shown(expected, 300)}",
    )


def ends(case: DatasetCase) -> None:
    """An index beyond the end raises IndexError, so that a `for` loop ends."""
    dataset = case.sized()
    for number in (len(dataset), len(dataset) + 3):
        try:
            row = dataset[number]
        except IndexError:
            continue
        raise Violation(f"row {number} of {len(dataset)} is {shown(row)}; raise IndexError")


def same_again(case: DatasetCase) -> None:
    """The same index returns the same row, in any order of reading."""
    dataset = case.sized()
    length = len(dataset)
    forwards = [dataset[number] for number in range(length)]
    backwards = [dataset[number] for number in reversed(range(length))]
    require(same(list(reversed(backwards)), forwards), "read backwards it gives other rows")


def iterates(case: DatasetCase) -> None:
    """Each iteration returns every row once, in order."""
    dataset = case.sized()
    rows = [dataset[number] for number in range(len(dataset))]
    for _ in range(2):
        require(same(list(iter(dataset)), rows), "iteration gives other rows than indexing")


def stream_repeats(case: DatasetCase) -> None:
    """A stream gives the same rows each time it is read; they equal the expected ones, if given."""
    first, second = ([row for chunk in case.stream().chunks() for row in chunk] for _ in range(2))
    dataset = case.stream()
    third, fourth = ([row for chunk in dataset.chunks() for row in chunk] for _ in range(2))
    require(same(first, second) and same(third, fourth) and same(first, third), "read again it gives other rows")


def stream_divides(case: DatasetCase) -> None:
    """The chunks of several workers, in turn, are the rows of a single worker."""
    alone = list(case.stream().in_order(case.stream().chunks()))
    expected = case.expected()
    require(
        expected is None or same(alone, expected),
        f"its rows are {shown(alone, 300)}; expected are {shown(expected, 300)}",
    )
    for workers in (2, 3):
        dataset = case.stream()
        parts = [list(case.stream().chunks(worker, workers)) for worker in range(workers)]
        turns = max(len(part) for part in parts)
        in_turn = [part[turn] for turn in range(turns) for part in parts if turn < len(part)]
        found = list(dataset.in_order(in_turn))
        require(
            same(found, alone),
            f"{workers} workers give {len(found)} rows that differ from the {len(alone)} rows of one worker",
        )


CASE = DatasetCase
CHECKS = (rows_by_number, ends, same_again, iterates, stream_repeats, stream_divides)
