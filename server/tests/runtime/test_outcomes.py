"""Outcomes reach the log in order and are kept while the disk takes nothing."""

import asyncio
from collections.abc import Sequence

import pytest
from server_runtime import SOON, Database, within

from twinkle_server.errors import LeaseLost, Unavailable
from twinkle_server.operations import Operation, Outcome, Submission
from twinkle_server.runtime.outcomes import Outcomes
from twinkle_server.store.memory import MemoryJournal


class Disk(MemoryJournal):
    """Fails as often as it is told to, and for one operation always."""

    def __init__(self) -> None:
        super().__init__(Database(), b"secret")
        self.faults: list[Exception] = []
        self.never: int | None = None
        self.not_even_failed = False
        self.commits: list[list[int]] = []

    async def finish(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        await asyncio.sleep(0)
        if self.faults:
            raise self.faults.pop(0)
        if any(each.operation == self.never and (each.error is None or self.not_even_failed) for each in outcomes):
            raise ValueError("a defect")
        self.commits.append([each.operation for each in outcomes])
        return await super().finish(outcomes)


async def _operations(journal: MemoryJournal, count: int) -> list[Operation]:
    return [(await journal.submit(Submission("ada", "queue_id", "forward", b"", number)))[1] for number in range(count)]


def test_what_comes_while_a_commit_runs_shares_the_next() -> None:
    async def scenario() -> None:
        disk, told = Disk(), []
        outcomes = Outcomes(disk, lambda operation, outcome: told.append(operation.id), print)
        outcomes.start()
        operations = await _operations(disk, 5)
        outcomes.put(operations[0], Outcome(1, result=b""))
        await asyncio.sleep(0)
        for operation in operations[1:]:
            outcomes.put(operation, Outcome(operation.id, result=b""))
        await outcomes.flush()
        assert told == [1, 2, 3, 4, 5]
        assert disk.commits == [[1], [2, 3, 4, 5]]
        await outcomes.stop(SOON)

    within(SOON, scenario)


def test_what_is_to_come_after_outcomes_comes_after_them() -> None:
    async def scenario() -> None:
        disk, told = Disk(), []
        outcomes = Outcomes(disk, lambda operation, outcome: told.append(operation.id), print)

        async def job() -> None:
            told.append(-1)

        outcomes.start()
        first, second = await _operations(disk, 2)
        outcomes.put(first, Outcome(1, result=b""))
        outcomes.then(job)
        outcomes.put(second, Outcome(2, result=b""))
        await outcomes.flush()
        assert told == [1, -1, 2]
        await outcomes.stop(SOON)

    within(SOON, scenario)


def test_a_full_disk_delays_outcomes_and_loses_none() -> None:
    async def scenario() -> None:
        disk, told = Disk(), []
        disk.faults = [Unavailable("full"), OSError(28, "full")]
        outcomes = Outcomes(disk, lambda operation, outcome: told.append(outcome.result), print)
        outcomes.start()
        (operation,) = await _operations(disk, 1)
        outcomes.put(operation, Outcome(1, result=b"kept"))
        await asyncio.sleep(0.01)
        assert outcomes.trouble == "full"
        await outcomes.flush()
        assert told == [b"kept"]
        assert outcomes.trouble is None
        await outcomes.stop(SOON)

    within(SOON, scenario)


@pytest.mark.parametrize("not_even_failed", [False, True])
def test_an_outcome_that_cannot_be_written_fails_alone_and_is_told(not_even_failed: bool) -> None:
    async def scenario() -> None:
        disk, told, unwritten = Disk(), {}, []
        disk.never, disk.not_even_failed = 2, not_even_failed
        outcomes = Outcomes(
            disk, lambda operation, outcome: told.update({operation.id: outcome.error}), print,
            lambda operation: unwritten.append(operation.id),
        )  # fmt: skip
        outcomes.start()
        for operation in await _operations(disk, 3):
            outcomes.put(operation, Outcome(operation.id, result=b""))
        await outcomes.flush()
        assert told == {1: None, 2: "the result could not be written", 3: None}
        assert unwritten == [2]
        await outcomes.stop(SOON)

    within(SOON, scenario)


def test_who_cannot_be_told_of_one_outcome_is_told_of_the_others() -> None:
    async def scenario() -> None:
        disk, told = Disk(), []

        def tell(operation: Operation, outcome: Outcome) -> None:
            if operation.id == 1:
                raise ZeroDivisionError
            told.append(operation.id)

        outcomes = Outcomes(disk, tell, print)
        outcomes.start()
        first, second, third = await _operations(disk, 3)
        outcomes.put(first, Outcome(1, result=b""))
        outcomes.put(second, Outcome(2, result=b""))
        outcomes.then(lambda: asyncio.sleep(0))
        outcomes.put(third, Outcome(3, result=b""))
        await outcomes.flush()
        assert told == [2, 3]
        assert (await disk.future(third.request, "ada")).status == "done"
        await outcomes.stop(SOON)

    within(SOON, scenario)


def test_nothing_is_written_after_another_process_took_over() -> None:
    async def scenario() -> None:
        disk, told, lost = Disk(), [], []
        disk.faults = [LeaseLost("taken")]
        outcomes = Outcomes(disk, lambda operation, outcome: told.append(operation.id), lost.append)
        outcomes.start()
        (operation,) = await _operations(disk, 1)
        outcomes.put(operation, Outcome(1, result=b""))
        await outcomes.flush()
        assert (told, lost, disk.commits) == ([], ["taken"], [])
        await outcomes.stop(SOON)

    within(SOON, scenario)
