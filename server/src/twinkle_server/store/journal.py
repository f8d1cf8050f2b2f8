"""The log of operations in SQLite: the `Journal` of `ports`, and what only the durable one can say."""

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from twinkle_server.errors import Gone, NotFound
from twinkle_server.operations import Accepted, Future, Operation, Outcome, Snapshot, Submission
from twinkle_server.settings import Limits
from twinkle_server.store import folders
from twinkle_server.store import statements as sql
from twinkle_server.store.blobs import Blobs
from twinkle_server.store.connections import driver
from twinkle_server.store.database import SqliteDatabase
from twinkle_server.store.requests import is_ours
from twinkle_server.store.writing import IN_ROW, Context, Finish, Stored, Submit, drop_payloads


class SqliteJournal:
    """The log of operations.

    Attributes:
        payloads: files of large payloads.
        results: files of large results.
        reads: operations whose outcome was read, and when; `retention` writes it into their rows.
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
            secret: that seals the ids of futures.
            epoch: of the lease; with another one, every write raises `LeaseLost`.
            limits: `small_bytes` counts.
            clock: seconds since 1970.
        """
        self.payloads, self.results = Blobs(data / "payloads"), Blobs(data / "results")
        self.reads: dict[int, float] = {}
        self.context = Context(secret, epoch, clock)
        self._database = database
        self._small = (limits or Limits()).small_bytes

    async def submit(
        self, submission: Submission, also: Callable[[Any], None] | None = None
    ) -> tuple[Accepted, Operation]:
        """Write an operation, or find the one that came before under its number.

        Args:
            submission: what is asked for.
            also: what is written in the same transaction when the operation is new and not refused.

        Returns:
            The id of its future, and the operation; it has its payload if it is new.

        Raises:
            SequenceConflict: another payload came before under that number.
            Gone: the number was used so long ago that nobody knows for what.
            LeaseLost: another process writes here now.
            Unavailable: the disk is full or fails.
        """
        digest = await self._digest(submission)
        stored = Stored()
        if submission.refusal is None:
            stored = await self._store(submission.payload, self.payloads)
        try:
            accepted, operation = await self._database.write(Submit(self.context, submission, digest, stored, also))
        except Exception:
            await self.payloads.drop(stored.files)
            raise
        if not accepted.fresh:
            await self.payloads.drop(stored.files)
        return accepted, operation

    async def finish(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Write how operations ended, all in one commit.

        Returns:
            The outcomes as they were written: an `also` may have refused, and what was over stays as it was.

        Raises:
            LookupError: there is no such operation.
            LeaseLost: another process writes here now.
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
        """Return what is known of a future.

        Raises:
            NotFound: it was never given to this tenant.
            Gone: it was, and is no longer kept.
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
        """Return every operation that is not over, by queue and number; without payloads."""
        return await self._list(sql.PENDING)

    async def after(self, queue_id: str, number: int) -> list[Operation]:
        """Return a queue's operations behind a number, in order; without payloads."""
        return await self._list(sql.AFTER, queue_id, number)

    async def payload(self, operation: int) -> bytes:
        """Return the payload of an operation.

        Raises:
            LookupError: a snapshot covers it, and it is gone.
        """
        row = await self._database.read(
            lambda connection: driver(connection).execute(sql.GET_PAYLOAD, (operation,)).fetchone()
        )
        if row is None or row[0] is None:
            raise LookupError(f"the payload of operation {operation} has been deleted")
        return await self.payloads.get(row[0]) if row[0] != IN_ROW else bytes(row[1])

    async def composition(self, operation: int) -> str | None:
        """Return how the passes of an operation were composed; None where that was not recorded."""
        row = await self._database.read(
            lambda connection: driver(connection).execute(sql.GET_COMPOSITION, (operation,)).fetchone()
        )
        return None if row is None else bytes(row[0]).decode()

    async def blame(self, operations: Sequence[int]) -> None:
        """Count that the engine died while these were under way."""

        def work(connection: Connection) -> None:
            raw = driver(connection)
            self.context.fence(raw)
            raw.executemany(sql.BLAME, [(self.context.epoch, operation) for operation in operations])

        await self._database.write(work)

    async def snapshotted(self, snapshot: Snapshot) -> list[str]:
        """Make a snapshot the queue's newest, drop the payloads that it covers, and return folders that are not needed.

        One that is older than what is there, or of a model that is gone, is itself not needed.

        Raises:
            LookupError: there is no such model.
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
            what = (
                snapshot.number,
                snapshot.folder,
                snapshot.digest,
                snapshot.size,
                self.context.clock(),
                snapshot.queue_id,
            )
            raw.execute(sql.SET_SNAPSHOT, what)
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
        """End the threads that write files."""
        self.payloads.close()
        self.results.close()

    async def _digest(self, submission: Submission) -> bytes:
        """Return what tells a repeated request from another one."""
        asked = submission.payload if submission.asked is None else submission.asked
        digest = hashlib.sha256(f"{submission.kind}\0".encode())
        if len(asked) > self._small:
            await asyncio.to_thread(digest.update, asked)
        else:
            digest.update(asked)
        return digest.digest()

    async def _list(self, query: str, *values: object) -> list[Operation]:
        found = await self._database.read(lambda connection: driver(connection).execute(query, values).fetchall())
        return [Operation(*row) for row in found]

    async def _store(self, data: bytes | None, files: Blobs) -> Stored:
        if data is None:
            return Stored()
        if len(data) <= self._small:
            return Stored(IN_ROW, data)
        return Stored(await files.put(data), None)
