"""Contract checks of data loaders: each row once per epoch, the correct length, exact resumption."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from twinkle_testing.contracts.case import Case, require
from twinkle_testing.contracts.values import shown


def _rows() -> list[dict[str, Any]]:
    return [{"number": number} for number in range(11)]


@dataclass(kw_only=True)
class DataLoaderCase(Case):
    """A data loader over distinct rows.

    Attributes:
        rows: the rows; by default eleven, in batches of four.
        shuffle: name of the argument that makes it permute the rows; empty if it has none.
    """

    kind = "dataloader"

    rows: Sequence[Any] = field(default_factory=_rows)
    shuffle: str = "shuffle"

    def build(self, **more: Any) -> Any:
        """Return the loader over the rows."""
        if not self.is_class:
            return super().build()
        return super().build(**{"dataset": list(self.rows), "batch_size": 4, **more})

    def loaders(self) -> list[Any]:
        """Return a loader in order, and a shuffling one."""
        return [self.build(), *([self.build(**{self.shuffle: True})] if self.shuffle and self.is_class else [])]


def epoch(loader: Any) -> list[list[str]]:
    """Return the batches of an epoch, each row as text."""
    return [[repr(row) for row in batch] for batch in loader]


def every_row_once(case: DataLoaderCase) -> None:
    """Each epoch contains every row exactly once, in any order."""
    wanted = sorted(map(repr, case.rows))
    for loader in case.loaders():
        for number in (1, 2):
            found = sorted(row for batch in epoch(loader) for row in batch)
            require(found == wanted, f"epoch {number} holds {shown(found, 300)}; the rows are {shown(wanted, 300)}")


def length(case: DataLoaderCase) -> None:
    """Its length is the number of batches of an epoch."""
    for loader in case.loaders():
        stated, found = len(loader), len(epoch(loader))
        require(stated == found, f"its length is {stated}, and an epoch has {found} batches")


def repeatable(case: DataLoaderCase) -> None:
    """Two loaders with the same arguments give the same epochs, independent of the random generators."""
    import torch

    for which in (0, -1):
        found = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            loader = case.loaders()[which]
            found.append([epoch(loader), epoch(loader)])
        require(
            found[0] == found[1], "two loaders with the same arguments give different batches; use a seed of its own"
        )


def resumed(case: DataLoaderCase) -> None:
    """After `resume_from_checkpoint` exactly the remaining rows follow, also in later epochs."""
    for which in range(len(case.loaders())):
        whole = case.loaders()[which]
        expected = [batch for _ in range(3) for batch in epoch(whole)]
        for stop in range(1, 2 * len(expected) // 3 + 1):
            state = _state_after(case.loaders()[which], stop)
            loader = case.loaders()[which]
            loader.resume_from_checkpoint(**state)
            found: list[list[str]] = []
            while len(found) < len(expected) - stop:
                more = epoch(loader)
                require(more, "an epoch after a resume is empty")
                found += more
            rest = expected[stop:]
            message = f"resumed after batch {stop} it gives {shown(found[:2])}; next comes {shown(rest[:2])}"
            require(found[: len(rest)] == rest, message)


def counts_rows(case: DataLoaderCase) -> None:
    """`get_state` counts the rows that were yielded, including a short last batch."""
    loader = case.build()
    total = sum(len(batch) for batch in loader)
    state = loader.get_state()
    require(state.get("consumed_train_samples") == total, f"after an epoch of {total} rows get_state() is {state}")


CASE = DataLoaderCase
CHECKS = (every_row_once, length, repeatable, resumed, counts_rows)


def _state_after(loader: Any, batches: int) -> dict[str, int]:
    """Return the state after a number of batches, across epochs."""
    seen = 0
    while True:
        for _ in loader:
            seen += 1
            if seen == batches:
                state: dict[str, int] = loader.get_state()
                return state
