"""The journal's two busy transactions: an operation comes in, operations end."""

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from sqlalchemy import Connection

from twinkle_server.errors import Gone, NotFound, SequenceConflict, ServiceError
from twinkle_server.operations import Accepted, Operation, Outcome, Status, Submission
from twinkle_server.store import statements as sql
from twinkle_server.store.connections import driver
from twinkle_server.store.faults import LeaseLost
from twinkle_server.store.requests import LOST_DIGEST, new_request
from twinkle_server.telemetry.redaction import redact

IN_ROW: Final = ""
"""Stands in a row for bytes that are in the database; another text is a file's name, NULL is nothing."""
_NEVER_REPLAYED: Final = ("sample", "unload")


@dataclass(frozen=True, slots=True)
class Context:
    """Who writes, and when.

    Attributes:
        secret: that seals the ids of futures.
        epoch: of the lease.
        clock: seconds since 1970.
    """

    secret: bytes
    epoch: int
    clock: Callable[[], float]

    def fence(self, raw: sqlite3.Connection) -> None:
        """Check within a transaction that this process has the lease.

        Raises:
            LeaseLost: another one has.
        """
        row = raw.execute(sql.FENCE).fetchone()
        if row is None or row[0] != self.epoch:
            raise LeaseLost("another process serves this data directory now: this one is ending", retry_after=5.0)


@dataclass(frozen=True, slots=True)
class Stored:
    """Bytes on their way into a row.

    Attributes:
        where: as it stands there.
        data: the bytes, if they are in the database.
    """

    where: str | None = None
    data: bytes | None = None

    @property
    def files(self) -> list[str]:
        """Names of files that hold them."""
        return [self.where] if self.where else []


@dataclass(slots=True)
class Submit:
    """Writes an operation, or finds the one that came before under its number."""

    context: Context
    submission: Submission
    digest: bytes
    stored: Stored
    also: Callable[[Any], None] | None

    def __call__(self, connection: Connection) -> tuple[Accepted, Operation]:
        """Do it, within a transaction."""
        raw, asked = driver(connection), self.submission
        self.context.fence(raw)
        number = asked.number
        if number is None:
            number = int(raw.execute(sql.NEXT_NUMBER, {"lane": asked.queue_id}).fetchone()[0])
        request = new_request(self.context.secret, asked.tenant)
        row = self._insert(raw, request, number)
        if row is None:
            return self._repeated(raw, number)
        status: Status = "pending"
        if asked.refusal is not None:
            status = "failed"
        elif self.also is not None:
            self.also(connection)
        operation = Operation(row, request, asked.tenant, asked.queue_id, number, asked.kind, asked.tokens, status)
        operation.payload = asked.payload if status == "pending" else None
        return Accepted(request, True), operation

    def _insert(self, raw: sqlite3.Connection, request: str, number: int) -> int | None:
        asked, now = self.submission, self.context.clock()
        refused = asked.refusal is not None
        columns = (request, asked.tenant, asked.queue_id, number, asked.kind, asked.tokens, self.digest)
        outcome = ("failed", redact(asked.refusal), "user") if asked.refusal is not None else ("pending", None, None)
        where = (self.context.epoch, self.stored.where, now, now if refused else None)
        row = raw.execute(sql.INSERT, columns + outcome + where).fetchone()
        if row is None:
            return None
        if asked.ordered:
            covered = raw.execute(sql.TOUCH_MODEL, (now, asked.queue_id, asked.tenant)).fetchone()
            if covered is not None and covered[0] is not None and number <= covered[0]:
                raise Gone(f"the result of sequence number {number} of {asked.queue_id!r} has expired")
        if self.stored.data is not None:
            raw.execute(sql.PUT_PAYLOAD, (row[0], self.stored.data))
        return int(row[0])

    def _repeated(self, raw: sqlite3.Connection, number: int) -> tuple[Accepted, Operation]:
        asked = self.submission
        row = raw.execute(sql.BY_NUMBER, (asked.queue_id, number, asked.tenant)).fetchone()
        if row is None:
            raise NotFound(f"model or sampling session {asked.queue_id[:120]!r} does not exist")
        if row[-1] not in (self.digest, LOST_DIGEST):
            raise SequenceConflict(
                f"sequence number {number} of {asked.queue_id!r} was used for another request; use the next number"
            )
        operation = Operation(*row[:-1])
        return Accepted(operation.request, False), operation


@dataclass(slots=True)
class Finish:
    """Writes how operations ended.

    Attributes:
        context: see `Context`.
        outcomes: with their results.
        used: files of results that rows name now.
        needless: files of payloads that no row names any more.
    """

    context: Context
    outcomes: Sequence[tuple[Outcome, Stored]]
    used: set[str] = field(default_factory=set)
    needless: list[str] = field(default_factory=list)

    def __call__(self, connection: Connection) -> list[Outcome]:
        """Do it, within a transaction."""
        raw = driver(connection)
        self.context.fence(raw)
        now = self.context.clock()
        return [self._one(connection, raw, outcome, stored, now) for outcome, stored in self.outcomes]

    def _one(
        self, connection: Connection, raw: sqlite3.Connection, outcome: Outcome, stored: Stored, now: float
    ) -> Outcome:
        also = outcome.also
        if also is None or outcome.error is not None or outcome.cancelled:
            return self._write(raw, outcome, stored, now)
        raw.execute("SAVEPOINT outcome")
        try:
            written = self._write(raw, outcome, stored, now)
            if written is outcome:
                also(connection)
        except ServiceError as error:
            raw.execute("ROLLBACK TO outcome")
            self.used.difference_update(stored.files)
            refused = replace(outcome, result=None, error=error.message, category="user", also=None)
            written = self._write(raw, refused, Stored(), now)
        raw.execute("RELEASE outcome")
        return written

    def _write(self, raw: sqlite3.Connection, outcome: Outcome, stored: Stored, now: float) -> Outcome:
        status, error, category = _end(outcome)
        kept = stored if status == "done" else Stored()
        what = (status, error, category, kept.where, self.context.epoch, now, outcome.operation)
        row = raw.execute(sql.FINISH, what).fetchone()
        if row is None:
            return _as_it_was(raw, outcome.operation)
        if kept.data is not None:
            raw.execute(sql.PUT_RESULT, (outcome.operation, kept.data))
        if status == "done" and outcome.composition is not None:
            raw.execute(sql.PUT_COMPOSITION, (outcome.operation, outcome.composition.encode()))
        self.used.update(kept.files)
        kind, payload, queue_id, tenant = row
        if kind == "create" and status != "done":
            raw.execute(sql.NEVER_MADE, (error, queue_id, tenant))
        if (status != "done" or kind in _NEVER_REPLAYED) and payload is not None:
            self.needless += drop_payloads(raw, [(outcome.operation, payload)])
        return outcome


def drop_payloads(raw: sqlite3.Connection, rows: Sequence[tuple[int, str | None]]) -> list[str]:
    """Drop payloads of operations, given as (id, where), and how passes were composed: what a replay would need.

    Returns:
        Files to remove after the commit.
    """
    raw.executemany(sql.DROP_PAYLOAD, [(row[0],) for row in rows])
    raw.executemany(sql.DROP_COMPOSITION, [(row[0],) for row in rows])
    raw.executemany(sql.FORGET_PAYLOAD, [(row[0],) for row in rows])
    return [row[1] for row in rows if row[1]]


def _end(outcome: Outcome) -> tuple[Status, str | None, str | None]:
    if outcome.cancelled:
        return "cancelled", outcome.error or "the request was cancelled", "user"
    if outcome.error is not None:
        return "failed", redact(outcome.error.encode("utf-8", "replace").decode()), outcome.category
    return "done", None, None


def _as_it_was(raw: sqlite3.Connection, operation: int) -> Outcome:
    """Return how an operation ended that was over before; a result in a file is left there."""
    row = raw.execute(sql.OUTCOME, (operation,)).fetchone()
    if row is None:
        raise LookupError(f"operation {operation} does not exist")
    status, error, category, result = row
    return Outcome(operation, result, error, category or "server", status == "cancelled")
