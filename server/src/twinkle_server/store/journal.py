"""The operation log in SQLite: the `Journal` of `ports`.

Its frequent transactions are `Submit` (a new operation) and `Finish` (outcomes of operations). A request id is 128
random bits and a seal that only this data folder can make for one tenant. Thus an expired id can be distinguished
from an invented one, or another tenant's, after its row was deleted.
"""

import asyncio
import hashlib
import hmac
import secrets
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection

from twinkle_server.errors import Gone, LeaseLost, NotFound, SequenceConflict, ServiceError
from twinkle_server.operations import LOST, Accepted, Future, Operation, Outcome, Snapshot, Status, Submission
from twinkle_server.settings import Limits
from twinkle_server.store import folders
from twinkle_server.store import statements as sql
from twinkle_server.store.blobs import Blobs
from twinkle_server.store.database import SqliteDatabase, driver
from twinkle_server.telemetry.logs import redact

_RANDOM: Final = 32
_SEAL: Final = 16
LOST_DIGEST: Final = hashlib.sha256(b"forward\0" + LOST).digest()
"""Digest in the row of a number that was given up, to distinguish it from those of requests."""


def new_request(secret: bytes, tenant: str) -> str:
    """Return a new request id for a tenant."""
    random = secrets.token_hex(_RANDOM // 2)
    return random + _seal(secret, random, tenant)


def is_ours(secret: bytes, request: str, tenant: str) -> bool:
    """Return whether an id was made by `new_request` for this tenant."""
    random, seal = request[:_RANDOM], request[_RANDOM:]
    return len(request) == _RANDOM + _SEAL and hmac.compare_digest(
        seal.encode("utf-8", "replace"), _seal(secret, random, tenant).encode()
    )


def _seal(secret: bytes, random: str, tenant: str) -> str:
    text = f"{random}\0{tenant}".encode("utf-8", "replace")
    return hashlib.blake2b(text, digest_size=_SEAL // 2, key=secret, person=b"request").hexdigest()


IN_ROW: Final = ""
"""Marks bytes that are in the database; another text is a file name, and NULL means no bytes."""
_NEVER_REPLAYED: Final = ("sample", "unload")


@dataclass(frozen=True, slots=True)
class Context:
    """Identity and clock of the writer.

    Attributes:
        secret: key of the seals of request ids.
        epoch: of the lease.
        clock: returns UTC seconds.
    """

    secret: bytes
    epoch: int
    clock: Callable[[], float]

    def fence(self, raw: sqlite3.Connection) -> None:
        """Check within a transaction that this process holds the lease.

        Raises:
            LeaseLost: another process holds it.
        """
        row = raw.execute(sql.FENCE).fetchone()
        if row is None or row[0] != self.epoch:
            raise LeaseLost("another process now serves this data folder; this one is shutting down", retry_after=5.0)


@dataclass(frozen=True, slots=True)
class Stored:
    """Bytes to be written into a row.

    Attributes:
        where: value of the row's column; see `IN_ROW`.
        data: the bytes, if they go into the database.
    """

    where: str | None = None
    data: bytes | None = None

    @property
    def files(self) -> list[str]:
        """Names of the files that contain them."""
        return [self.where] if self.where else []


@dataclass(slots=True)
class Submit:
    """Writes an operation, or returns the earlier one of the same number."""

    context: Context
    submission: Submission
    digest: bytes
    stored: Stored
    in_transaction: Callable[[Any], None] | None

    def __call__(self, connection: Connection) -> tuple[Accepted, Operation]:
        """Run within a transaction."""
        raw, submission = driver(connection), self.submission
        self.context.fence(raw)
        number = submission.number
        if number is None:
            number = int(raw.execute(sql.NEXT_NUMBER, {"lane": submission.queue_id}).fetchone()[0])
        request = new_request(self.context.secret, submission.tenant)
        row = self._insert(raw, request, number)
        if row is None:
            return self._repeated(raw, number)
        status: Status = "pending"
        if submission.refusal is not None:
            status = "failed"
        elif self.in_transaction is not None:
            self.in_transaction(connection)
        operation = Operation(
            row, request, submission.tenant, submission.queue_id, number, submission.kind, submission.tokens, status
        )
        operation.payload = submission.payload if status == "pending" else None
        return Accepted(request, True), operation

    def _insert(self, raw: sqlite3.Connection, request: str, number: int) -> int | None:
        submission, now = self.submission, self.context.clock()
        refused = submission.refusal is not None
        columns = (
            request,
            submission.tenant,
            submission.queue_id,
            number,
            submission.kind,
            submission.tokens,
            self.digest,
        )
        outcome = (
            ("failed", redact(submission.refusal), "user")
            if submission.refusal is not None
            else ("pending", None, None)
        )
        where = (self.context.epoch, self.stored.where, now, now if refused else None)
        row = raw.execute(sql.INSERT, columns + outcome + where).fetchone()
        if row is None:
            return None
        if submission.ordered:
            covered = raw.execute(sql.TOUCH_MODEL, (now, submission.queue_id, submission.tenant)).fetchone()
            if covered is not None and covered[0] is not None and number <= covered[0]:
                raise Gone(f"the result of sequence number {number} of {submission.queue_id!r} has expired")
        if self.stored.data is not None:
            raw.execute(sql.PUT_PAYLOAD, (row[0], self.stored.data))
        return int(row[0])

    def _repeated(self, raw: sqlite3.Connection, number: int) -> tuple[Accepted, Operation]:
        submission = self.submission
        row = raw.execute(sql.BY_NUMBER, (submission.queue_id, number, submission.tenant)).fetchone()
        if row is None:
            raise NotFound(f"model or sampling session {submission.queue_id[:120]!r} does not exist")
        if row[-1] not in (self.digest, LOST_DIGEST):
            raise SequenceConflict(
                f"sequence number {number} of {submission.queue_id!r} was used for another request; use the next number"
            )
        operation = Operation(*row[:-1])
        return Accepted(operation.request, False), operation


@dataclass(slots=True)
class Finish:
    """Writes outcomes.

    Attributes:
        context: see `Context`.
        outcomes: with their results.
        used: result files that rows now name.
        needless: payload files that no row names any more.
    """

    context: Context
    outcomes: Sequence[tuple[Outcome, Stored]]
    used: set[str] = field(default_factory=set)
    needless: list[str] = field(default_factory=list)

    def __call__(self, connection: Connection) -> list[Outcome]:
        """Run within a transaction."""
        raw = driver(connection)
        self.context.fence(raw)
        now = self.context.clock()
        return [self._one(connection, raw, outcome, stored, now) for outcome, stored in self.outcomes]

    def _one(
        self, connection: Connection, raw: sqlite3.Connection, outcome: Outcome, stored: Stored, now: float
    ) -> Outcome:
        in_transaction = outcome.in_transaction
        if in_transaction is None or outcome.error is not None or outcome.cancelled:
            return self._write(raw, outcome, stored, now)
        raw.execute("SAVEPOINT outcome")
        try:
            written = self._write(raw, outcome, stored, now)
            if written is outcome:
                in_transaction(connection)
        except ServiceError as error:
            raw.execute("ROLLBACK TO outcome")
            self.used.difference_update(stored.files)
            refused = replace(outcome, result=None, error=error.message, category="user", in_transaction=None)
            written = self._write(raw, refused, Stored(), now)
        raw.execute("RELEASE outcome")
        return written

    def _write(self, raw: sqlite3.Connection, outcome: Outcome, stored: Stored, now: float) -> Outcome:
        status, error, category = _end(outcome)
        kept = stored if status == "done" else Stored()
        params = (status, error, category, kept.where, self.context.epoch, now, outcome.operation)
        row = raw.execute(sql.FINISH, params).fetchone()
        if row is None:
            return _recorded_outcome(raw, outcome.operation)
        if kept.data is not None:
            raw.execute(sql.PUT_RESULT, (outcome.operation, kept.data))
        if status == "done" and outcome.composition is not None:
            raw.execute(sql.PUT_COMPOSITION, (outcome.operation, outcome.composition.encode()))
        self.used.update(kept.files)
        kind, payload, queue_id, tenant, number = row
        if status == "done" and outcome.figures is not None:
            figures = (outcome.operation, tenant, queue_id, number, kind, now, outcome.figures)
            raw.execute(sql.PUT_FIGURES, figures)
        if kind == "create" and status != "done":
            raw.execute(sql.CREATION_FAILED, (error, queue_id, tenant))
        if (status != "done" or kind in _NEVER_REPLAYED) and payload is not None:
            self.needless += drop_payloads(raw, [(outcome.operation, payload)])
        return outcome


def drop_payloads(raw: sqlite3.Connection, rows: Sequence[tuple[int, str | None]]) -> list[str]:
    """Delete payloads and compositions of operations, given as (id, where), which only a replay would need.

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


def _recorded_outcome(raw: sqlite3.Connection, operation: int) -> Outcome:
    """Return the outcome of an operation that ended before; a result in a file is not read."""
    row = raw.execute(sql.OUTCOME, (operation,)).fetchone()
    if row is None:
        raise LookupError(f"operation {operation} does not exist")
    status, error, category, result = row
    return Outcome(operation, result, error, category or "server", status == "cancelled")


class SqliteJournal:
    """The operation log.

    Attributes:
        payloads: files of large payloads.
        results: files of large results.
        reads: time of the first read of outcomes, by operation; `retention` writes it into their rows.
    """

    def __init__(
        self,
        database: SqliteDatabase,
        data: Path,
        secret: bytes,
        epoch: int,
        limits: Limits | None = None,
        clock: Callable[[], float] = lambda: time.time(),
    ) -> None:
        """Use a database.

        Args:
            database: with the newest schema.
            data: directory for large payloads and results.
            secret: key of the seals of request ids.
            epoch: of the lease; if it is not the current one, every write raises `LeaseLost`.
            limits: the setting `small_bytes` is used.
            clock: returns UTC seconds.
        """
        self.payloads, self.results = Blobs(data / "payloads"), Blobs(data / "results")
        self.reads: dict[int, float] = {}
        self.context = Context(secret, epoch, clock)
        self._database = database
        self._small = (limits or Limits()).small_bytes

    async def submit(
        self, submission: Submission, in_transaction: Callable[[Any], None] | None = None
    ) -> tuple[Accepted, Operation]:
        """Write an operation, or return the earlier one of the same number.

        Args:
            submission: the operation.
            in_transaction: called in the transaction that writes the operation, if it is new and not refused.

        Returns:
            The request id, and the operation, with its payload if it is new.

        Raises:
            SequenceConflict: the number was used with another payload.
            Gone: the number was used, and its row has been deleted.
            LeaseLost: another process serves the data folder.
            Unavailable: the disk is full or fails.
        """
        digest = await self._digest(submission)
        stored = Stored()
        if submission.refusal is None:
            stored = await self._store(submission.payload, self.payloads)
        try:
            accepted, operation = await self._database.write(
                Submit(self.context, submission, digest, stored, in_transaction)
            )
        except Exception:
            await self.payloads.drop(stored.files)
            raise
        if not accepted.fresh:
            await self.payloads.drop(stored.files)
        return accepted, operation

    async def finish(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Write outcomes in one commit.

        Returns:
            The outcomes as written: a function `in_transaction` may have refused, and operations that had ended are
            unchanged.

        Raises:
            LookupError: an operation does not exist.
            LeaseLost: another process serves the data folder.
            Unavailable: the disk is full or fails; nothing is written.
        """
        stored: list[tuple[Outcome, Stored]] = []
        names: list[str] = []
        try:
            for outcome in outcomes:
                stored.append((outcome, await self._store(outcome.result, self.results)))
                names += stored[-1][1].files
            write = Finish(self.context, stored)
            written = await self._database.write(write)
        except Exception:
            await self.results.drop(names)
            raise
        await self.results.drop([name for name in names if name not in write.used])
        await self.payloads.drop(write.needless)
        return written

    async def future(self, request: str, tenant: str) -> Future:
        """Return the state of a future.

        Raises:
            NotFound: the tenant has no such request.
            Gone: its result is no longer kept.
        """
        row = await self._database.read(
            lambda connection: driver(connection).execute(sql.FUTURE, (request, tenant)).fetchone()
        )
        if row is None and not is_ours(self.context.secret, request, tenant):
            raise NotFound(f"request {request[:80]!r} does not exist")
        if row is None or row[6]:
            raise Gone(f"the result of request {request!r} has expired; send the request again as a new one")
        operation, kind, status, queue_id, error, category, _, where, data = row
        if status == "pending":
            return Future(kind, status, queue_id)
        self.reads.setdefault(operation, self.context.clock())
        if where:
            try:
                data = await self.results.get(where)
            except LookupError:
                return Future(kind, "failed", queue_id, error="the result was lost: its file cannot be read")
        return Future(kind, status, queue_id, data, error, category or "server")

    async def pending(self) -> list[Operation]:
        """Return all pending operations by queue and number, without payloads."""
        return await self._list(sql.PENDING)

    async def after(self, queue_id: str, number: int) -> list[Operation]:
        """Return a queue's operations after a number in order, without payloads."""
        return await self._list(sql.AFTER, queue_id, number)

    async def payload(self, operation: int) -> bytes:
        """Return the payload of an operation.

        Raises:
            LookupError: it was deleted, because a snapshot covers the operation.
        """
        row = await self._database.read(
            lambda connection: driver(connection).execute(sql.GET_PAYLOAD, (operation,)).fetchone()
        )
        if row is None or row[0] is None:
            raise LookupError(f"the payload of operation {operation} has been deleted")
        return await self.payloads.get(row[0]) if row[0] != IN_ROW else bytes(row[1])

    async def composition(self, operation: int) -> str | None:
        """Return the composition of an operation's passes; None if it was not recorded."""
        row = await self._database.read(
            lambda connection: driver(connection).execute(sql.GET_COMPOSITION, (operation,)).fetchone()
        )
        return None if row is None else bytes(row[0]).decode()

    async def blame(self, operations: Sequence[int]) -> None:
        """Count a death of the engine for the operations that were running."""

        def work(connection: Connection) -> None:
            raw = driver(connection)
            self.context.fence(raw)
            raw.executemany(sql.BLAME, [(self.context.epoch, operation) for operation in operations])

        await self._database.write(work)

    async def snapshotted(self, snapshot: Snapshot) -> list[str]:
        """Record a snapshot as the queue's newest, and delete the payloads that it covers.

        Returns:
            Folders that are no longer needed: of the previous snapshot, or of this one if it is outdated.

        Raises:
            LookupError: the model does not exist.
        """
        files: list[str] = []

        def work(connection: Connection) -> list[str]:
            raw = driver(connection)
            self.context.fence(raw)
            row = raw.execute(sql.SNAPSHOT, (snapshot.queue_id,)).fetchone()
            if row is None:
                raise LookupError(f"model {snapshot.queue_id!r} of a snapshot does not exist")
            number, folder, _, _, status = row
            if status == "gone" or (number is not None and number > snapshot.number):
                return [snapshot.folder]
            params = (
                snapshot.number,
                snapshot.folder,
                snapshot.digest,
                snapshot.size,
                self.context.clock(),
                snapshot.queue_id,
            )
            raw.execute(sql.SET_SNAPSHOT, params)
            folders.name(connection, snapshot.folder, self.context.clock())
            covered = raw.execute(sql.COVERED, (snapshot.queue_id, snapshot.number)).fetchall()
            files.extend(drop_payloads(raw, covered))
            return [folder] if folder is not None and folder != snapshot.folder else []

        needless = await self._database.write(work)
        await self.payloads.drop(files)
        return needless

    async def snapshot(self, queue_id: str) -> Snapshot | None:
        """Return a queue's newest snapshot."""
        row = await self._database.read(
            lambda connection: driver(connection).execute(sql.SNAPSHOT, (queue_id,)).fetchone()
        )
        return None if row is None or row[1] is None else Snapshot(queue_id, *row[:4])

    def close(self) -> None:
        """Stop the threads that write files."""
        self.payloads.close()
        self.results.close()

    async def _digest(self, submission: Submission) -> bytes:
        """Return the digest that identifies a retried request."""
        original = submission.payload if submission.original is None else submission.original
        digest = hashlib.sha256(f"{submission.kind}\0".encode())
        if len(original) > self._small:
            await asyncio.to_thread(digest.update, original)
        else:
            digest.update(original)
        return digest.digest()

    async def _list(self, query: str, *values: object) -> list[Operation]:
        rows = await self._database.read(lambda connection: driver(connection).execute(query, values).fetchall())
        return [Operation(*row) for row in rows]

    async def _store(self, data: bytes | None, files: Blobs) -> Stored:
        if data is None:
            return Stored()
        if len(data) <= self._small:
            return Stored(IN_ROW, data)
        return Stored(await files.put(data), None)
