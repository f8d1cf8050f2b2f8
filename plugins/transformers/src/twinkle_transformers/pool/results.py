"""`Results`: results of a call's operations, each reported as soon as the operation has ended."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from twinkle.engine import AdapterRef, Operation, OperationError, OperationResult
from twinkle_transformers.pool.work import WorkItem

Result: TypeAlias = OperationResult | OperationError
Ended: TypeAlias = Callable[[int, Result], None]
"""Called with the index of an operation in its call, and its result."""


class Results:
    """Results of a call's operations.

    Args:
        operations: the operations of the call.
        finish: returns the result of a work item.
        ended: called for each operation, those of one adapter in their order; None reports nothing.
    """

    def __init__(
        self, operations: Sequence[Operation], finish: Callable[[WorkItem], Result], ended: Ended | None
    ) -> None:
        self._adapters = [_name(operation.adapter) for operation in operations]
        self._finish, self._ended = finish, ended
        self._results: dict[int, Result] = {}
        self._waiting: dict[str | None, deque[tuple[int, WorkItem | OperationError]]] = {}

    def add(self, works: Sequence[WorkItem | OperationError]) -> None:
        """Add the works of all operations, in order; those that were refused have ended."""
        for index, (adapter, work) in enumerate(zip(self._adapters, works, strict=True)):
            self._waiting.setdefault(adapter, deque()).append((index, work))
        self.advance()

    def advance(self) -> None:
        """Report the operations that have ended since the last call."""
        if self._ended is None:
            return
        for works in self._waiting.values():
            while works and _has_ended(works[0][1]):
                self._report(*works.popleft())

    def all(self) -> list[Result]:
        """Return the result of each operation, in order; operations that were not computed have failed."""
        for works in self._waiting.values():
            while works:
                self._report(*works.popleft())
        return [self._results[index] for index in range(len(self._adapters))]

    def _report(self, index: int, work: WorkItem | OperationError) -> None:
        result = self._results[index] = work if isinstance(work, OperationError) else self._finish(work)
        if self._ended is not None:
            self._ended(index, result)


def _has_ended(work: WorkItem | OperationError) -> bool:
    return isinstance(work, OperationError) or work.error is not None or all(part.done for part in work.parts)


def _name(adapter: str | AdapterRef | None) -> str | None:
    return adapter.name if isinstance(adapter, AdapterRef) else adapter
