"""A journal in memory, for benchmarks that measure the service without the disk.

Nothing is durable, no lease is held, and nothing is ever purged.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from twinkle_server.errors import Gone, NotFound, SequenceConflict, ServiceError
from twinkle_server.operations import Accepted, Future, Operation, Outcome, Snapshot, Submission
from twinkle_server.ports import Database
from twinkle_server.store.journal import LOST_DIGEST, is_ours, new_request


class MemoryJournal:
    """The `Journal` of `ports`, in dictionaries; the `in_transaction` functions of operations write to a database."""

    def __init__(self, database: Database, secret: bytes) -> None:
        """Use a database for `in_transaction` functions."""
        self._database, self._secret = database, secret
        self._operations: dict[int, Operation] = {}
        self._digests: dict[int, bytes] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._requests: dict[str, int] = {}
        self._queues: dict[str, dict[int, int]] = {}
        self._snapshots: dict[str, Snapshot] = {}
        self.reads: dict[int, float] = {}

    async def submit(
        self, submission: Submission, in_transaction: Callable[[Any], None] | None = None
    ) -> tuple[Accepted, Operation]:
        """See `SqliteJournal.submit`."""
        numbers = self._queues.setdefault(submission.queue_id, {})
        snapshot = self._snapshots.get(submission.queue_id)
        covered = snapshot.number if snapshot is not None else -1
        number = submission.number if submission.number is not None else max(*numbers, covered, -1) + 1
        digest = _digest(submission)
        if number in numbers:
            return self._repeated(numbers[number], submission, digest)
        if submission.ordered and number <= covered:
            raise Gone(f"the result of sequence number {number} of {submission.queue_id!r} has expired")
        if in_transaction is not None and submission.refusal is None:
            await self._database.write(in_transaction)
        request = new_request(self._secret, submission.tenant)
        operation = Operation(
            id=len(self._operations) + 1,
            request=request,
            tenant=submission.tenant,
            queue_id=submission.queue_id,
            number=number,
            kind=submission.kind,
            tokens=submission.tokens,
            payload=submission.payload,
        )
        numbers[number] = operation.id
        self._operations[operation.id], self._digests[operation.id] = operation, digest
        self._requests[request] = operation.id
        if submission.refusal is not None:
            await self.finish([Outcome(operation.id, error=submission.refusal, category="user")])
        return Accepted(request, True), replace(operation)

    def _repeated(self, row: int, submission: Submission, digest: bytes) -> tuple[Accepted, Operation]:
        operation = self._operations[row]
        if operation.tenant != submission.tenant:
            raise NotFound(f"model or sampling session {submission.queue_id[:120]!r} does not exist")
        if self._digests[row] not in (digest, LOST_DIGEST):
            raise SequenceConflict(
                f"sequence number {operation.number} of {operation.queue_id!r} was used for another request"
            )
        return Accepted(operation.request, False), replace(operation, payload=None)

    async def finish(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """See `SqliteJournal.finish`."""
        return [await self._finish(outcome) for outcome in outcomes]

    async def _finish(self, outcome: Outcome) -> Outcome:
        operation = self._operations.get(outcome.operation)
        if operation is None:
            raise LookupError(f"operation {outcome.operation} does not exist")
        if operation.status != "pending":
            return self._outcomes[operation.id]
        if outcome.in_transaction is not None and outcome.error is None and not outcome.cancelled:
            try:
                await self._database.write(outcome.in_transaction)
            except ServiceError as error:
                outcome = replace(outcome, result=None, error=error.message, category="user", in_transaction=None)
        if outcome.error is not None or outcome.cancelled:
            outcome = replace(outcome, result=None)
        operation.status = "cancelled" if outcome.cancelled else "done" if outcome.error is None else "failed"
        self._outcomes[operation.id] = outcome
        return outcome

    async def future(self, request: str, tenant: str) -> Future:
        """See `SqliteJournal.future`."""
        operation = self._operations.get(self._requests.get(request, 0))
        if operation is None or operation.tenant != tenant:
            if is_ours(self._secret, request, tenant):
                raise Gone(f"the result of request {request!r} has expired")
            raise NotFound(f"request {request[:80]!r} does not exist")
        if operation.status == "pending":
            return Future(operation.kind, "pending", operation.queue_id)
        outcome = self._outcomes[operation.id]
        error = outcome.error or ("the request was cancelled" if outcome.cancelled else None)
        return Future(operation.kind, operation.status, operation.queue_id, outcome.result, error, outcome.category)

    async def pending(self) -> list[Operation]:
        """See `SqliteJournal.pending`."""
        pending = [replace(row, payload=None) for row in self._operations.values() if row.status == "pending"]
        return sorted(pending, key=lambda row: (row.queue_id, row.number))

    async def after(self, queue_id: str, number: int) -> list[Operation]:
        """See `SqliteJournal.after`."""
        numbers = sorted(key for key in self._queues.get(queue_id, {}) if key > number)
        return [replace(self._operations[self._queues[queue_id][key]], payload=None) for key in numbers]

    async def payload(self, operation: int) -> bytes:
        """See `SqliteJournal.payload`."""
        row = self._operations.get(operation)
        if row is None or row.payload is None:
            raise LookupError(f"the payload of operation {operation} has been deleted")
        return row.payload

    async def composition(self, operation: int) -> str | None:
        """See `SqliteJournal.composition`."""
        outcome = self._outcomes.get(operation)
        return None if outcome is None else outcome.composition

    async def blame(self, operations: Sequence[int]) -> None:
        """See `SqliteJournal.blame`."""
        for operation in operations:
            if self._operations[operation].status == "pending":
                self._operations[operation].attempts += 1

    async def snapshotted(self, snapshot: Snapshot) -> list[str]:
        """See `SqliteJournal.snapshotted`."""
        before = self._snapshots.get(snapshot.queue_id)
        if before is not None and before.number > snapshot.number:
            return [snapshot.folder]
        self._snapshots[snapshot.queue_id] = snapshot
        for number, operation in self._queues.get(snapshot.queue_id, {}).items():
            if number <= snapshot.number and self._operations[operation].status != "pending":
                self._operations[operation].payload = None
        return [before.folder] if before is not None and before.folder != snapshot.folder else []

    async def snapshot(self, queue_id: str) -> Snapshot | None:
        """See `SqliteJournal.snapshot`."""
        return self._snapshots.get(queue_id)


def _digest(submission: Submission) -> bytes:
    original = submission.payload if submission.original is None else submission.original
    return hashlib.sha256(f"{submission.kind}\0".encode() + original).digest()
