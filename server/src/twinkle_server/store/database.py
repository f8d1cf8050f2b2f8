"""SQLite with a single writer thread and durable group commits: writes that wait share the next commit.

Also opens connections, and translates their errors for callers.
"""

import asyncio
import concurrent.futures
import logging
import queue
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar, cast
from urllib.parse import quote

from sqlalchemy import Connection, Engine, NullPool, create_engine
from sqlalchemy.exc import DBAPIError

from twinkle_server.errors import BadRequest, StoreError, Unavailable
from twinkle_server.failpoints import reach
from twinkle_server.store.filesystem import check_local

_BUSY_SECONDS: Final = 5.0
_DISK: Final = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_INTERRUPT,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_PROTOCOL,
        sqlite3.SQLITE_READONLY,
    }
)


def driver(connection: Connection) -> sqlite3.Connection:
    """Return the SQLite connection below SQLAlchemy's, for statements that must be fast."""
    return cast(sqlite3.Connection, connection.connection.dbapi_connection)


def engine(connect: Callable[[], sqlite3.Connection]) -> Engine:
    """Return an SQLAlchemy engine over connections from `connect`; transactions are begun explicitly."""
    return create_engine("sqlite://", creator=connect, poolclass=NullPool, isolation_level="AUTOCOMMIT")


def connect(path: Path, readonly: bool = False) -> sqlite3.Connection:
    """Open a database file.

    Raises:
        StoreError: it is not a database, or its file system is not supported.
    """
    address = f"file:{quote(str(path))}?mode={'ro' if readonly else 'rwc'}"
    raw = None
    try:
        raw = sqlite3.connect(
            address,
            uri=True,
            timeout=_BUSY_SECONDS,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=256,
        )
        _prepare(raw, readonly)
    except sqlite3.Error as error:
        if raw is not None:
            raw.close()
        raise StoreError(
            f"cannot open the database {path}: {error}; restore it from a backup, or choose another --data"
        ) from error
    return raw


def _prepare(raw: sqlite3.Connection, readonly: bool) -> None:
    raw.execute("PRAGMA foreign_keys = ON")
    raw.execute("PRAGMA cache_size = -16384")
    if readonly:
        raw.execute("PRAGMA query_only = ON")
        return
    raw.execute("PRAGMA auto_vacuum = INCREMENTAL")  # effective only in a new file, before the first write
    mode = raw.execute("PRAGMA journal_mode = WAL").fetchone()[0]
    if mode != "wal":
        raise sqlite3.OperationalError(f"its file system does not support write-ahead logging (mode {mode!r})")
    raw.execute("PRAGMA synchronous = FULL")
    raw.execute(f"PRAGMA journal_size_limit = {64 * 2**20}")


def translate_error(error: Exception) -> Exception:
    """Return the error for callers: `Unavailable` for disk faults, `BadRequest` for values that no column can hold."""
    if isinstance(error, UnicodeEncodeError | OverflowError):
        return BadRequest("the request contains a number beyond 64 bits or text that is not Unicode")
    cause: BaseException | None = error.orig if isinstance(error, DBAPIError) else error
    code = getattr(cause, "sqlite_errorcode", None)
    if code is not None and code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        fault = Unavailable(
            "the service's database is damaged: its operator must restore it (`twinkle server check` says more)",
            retry_after=30.0,
        )
        fault.__cause__ = error
        return fault
    failed = isinstance(cause, sqlite3.OperationalError) if code is None else code & 0xFF in _DISK
    closed = isinstance(cause, sqlite3.ProgrammingError) and "closed database" in str(cause)
    if failed or closed or isinstance(cause, OSError | StoreError):
        fault = Unavailable("the store cannot write at the moment (disk full or failing): try again", retry_after=5.0)
        fault.__cause__ = error
        return fault
    return error


T = TypeVar("T")
_LOG = logging.getLogger(__name__)
_LARGEST: Final = 1024
"""Maximum number of jobs in one commit."""
_OLDEST: Final = (3, 35)
"""The first SQLite version with `RETURNING`."""


@dataclass(slots=True)
class _Job:
    work: Callable[[Connection], Any]
    future: "asyncio.Future[Any] | concurrent.futures.Future[Any]"
    value: Any = None
    error: Exception | None = None

    def settle(self) -> None:
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.value)


class SqliteDatabase:
    """A database file.

    Attributes:
        healthy: whether the last commit succeeded.
        commits: number of commits so far.
    """

    def __init__(self, path: Path, readers: int = 2) -> None:
        """Open the file, and create it if needed; `schema.migrate` creates its tables.

        Args:
            path: of the file, in an existing folder.
            readers: number of threads that read.

        Raises:
            StoreError: the file cannot be opened, or is on a network file system.
        """
        check_local(path.parent)
        if sqlite3.sqlite_version_info < _OLDEST:
            raise StoreError(f"SQLite must be {'.'.join(map(str, _OLDEST))} or newer, got {sqlite3.sqlite_version}")
        path.touch(mode=0o600)
        self.healthy = True
        self.commits = 0
        self._path = path
        self._closed = False
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._writer = _Writer(path)
        self._thread: threading.Thread | None = None
        self._start = threading.Lock()
        self._local = threading.local()
        self._reading: list[Connection] = []
        self._readers = concurrent.futures.ThreadPoolExecutor(readers, "twinkle-store-read")

    async def write(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in a transaction that is durable when this returns; several share one commit, each atomically.

        If the caller is cancelled, the write may or may not happen.

        Raises:
            Unavailable: the disk is full or fails, or the database is closed; nothing of `work` is written.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._put(_Job(work, future))
        return await future

    def write_now(self, work: Callable[[Connection], T]) -> T:
        """Like `write`, for callers without an event loop; blocks."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._put(_Job(work, future))
        return future.result()

    async def read(self, work: Callable[[Connection], T]) -> T:
        """Run `work`, which only reads, on a consistent state of the database.

        Raises:
            Unavailable: the disk fails, or the database is closed.
        """
        if self._closed:
            raise _closed()
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._read, work)

    def close(self) -> None:
        """Finish queued writes, checkpoint the write-ahead log, and close the database; blocks."""
        with self._start:
            if self._closed:
                return
            self._closed = True
            self._jobs.put(None)
        if self._thread is not None:
            self._thread.join()
        self._readers.shutdown()
        for connection in self._reading:
            connection.close()
        self._writer.close()

    def _put(self, job: _Job) -> None:
        with self._start:
            if self._closed:
                raise _closed()
            self._jobs.put(job)
            self._wake_writer(job.future)

    def _wake_writer(self, _future: "asyncio.Future[Any] | concurrent.futures.Future[Any]") -> None:
        """Start the writer thread if it does not run; overridden by simulations without threads."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="twinkle-store-write", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while self._commit_next():
            pass

    def _commit_next(self) -> bool:
        """Wait for jobs and commit them; return False after the last ones."""
        batch, last = self._gather()
        if batch:
            self.healthy = self._writer.commit(batch)
            self.commits += 1
            _deliver(batch)
        return not last

    def _gather(self) -> tuple[list[_Job], bool]:
        """Wait for a job, and take all queued ones; also return whether they are the last."""
        batch: list[_Job] = []
        job = self._jobs.get()
        while job is not None:
            batch.append(job)
            if len(batch) == _LARGEST:
                return batch, False
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return batch, False
        return batch, True

    def _read(self, work: Callable[[Connection], T]) -> T:
        connection: Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            self._local.connection = connection = engine(lambda: connect(self._path, readonly=True)).connect()
            self._reading.append(connection)
        raw = driver(connection)
        try:
            raw.execute("BEGIN")
            return work(connection)
        except Exception as error:
            translated = translate_error(error)
            if translated is error:
                raise
            raise translated from error
        finally:
            if raw.in_transaction:
                raw.execute("ROLLBACK")


def _deliver(batch: list[_Job]) -> None:
    """Resolve the futures of jobs, with one call into each event loop."""
    loops: dict[asyncio.AbstractEventLoop, list[_Job]] = {}
    for job in batch:
        if isinstance(job.future, asyncio.Future):
            loops.setdefault(job.future.get_loop(), []).append(job)
        else:
            job.settle()
    for loop, jobs in loops.items():
        try:
            loop.call_soon_threadsafe(_settle, jobs)
        except RuntimeError:
            _LOG.warning("%d writes finished after their event loop was closed", len(jobs))


def _settle(jobs: list[_Job]) -> None:
    for job in jobs:
        job.settle()


class _Writer:
    """The connection that writes; used by one thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lost = False
        self._open()

    def _open(self) -> None:
        self._connection = engine(lambda: connect(self._path)).connect()
        self._connection.begin()  # never committed by SQLAlchemy: this class runs the real transactions
        self._raw = driver(self._connection)

    def commit(self, batch: list[_Job]) -> bool:
        """Run jobs in one transaction, and set their values or errors; return whether the database works."""
        try:
            if self._lost:
                self._reopen()
            self._raw.execute("BEGIN IMMEDIATE")
            if len(batch) == 1:
                self._alone(batch[0])
            else:
                self._together(batch)
            reach("store.before_commit")
            self._raw.execute("COMMIT")
            reach("store.after_commit")
        except _Undone:
            self._undo()
        except (sqlite3.Error, OSError, StoreError) as error:
            _LOG.error("the store could not commit %d writes: %s", len(batch), error)
            for job in batch:
                job.error = translate_error(error)
            if not self._lost:
                self._undo()
        return not any(isinstance(job.error, Unavailable) for job in batch)

    def _alone(self, job: _Job) -> None:
        """Run a single job without a savepoint."""
        self._try(job)
        if job.error is not None:
            raise _Undone

    def _together(self, batch: list[_Job]) -> None:
        for job in batch:
            self._raw.execute("SAVEPOINT job")
            self._try(job)
            if job.error is not None:
                if not self._raw.in_transaction:  # SQLite rolled the whole transaction back
                    raise sqlite3.OperationalError(str(job.error))
                self._raw.execute("ROLLBACK TO job")
            self._raw.execute("RELEASE job")

    def _try(self, job: _Job) -> None:
        try:
            job.value = job.work(self._connection)
        except StoreError as error:  # raised by the job itself, for example for a lost lease
            job.error = error
        except Exception as error:
            job.error = translate_error(error)

    def _undo(self) -> None:
        """Roll back a failed transaction."""
        try:
            if self._raw.in_transaction:
                self._raw.execute("ROLLBACK")
        except sqlite3.Error:
            _LOG.exception("the store could not roll back; reopening its connection before the next commit")
            self._lost = True

    def _reopen(self) -> None:
        self._raw.close()
        self._connection.detach()  # otherwise its rollback on garbage collection would fail
        self._open()
        self._lost = False

    def close(self) -> None:
        try:
            self._raw.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.Error as error:
            _LOG.warning("could not checkpoint the write-ahead log; the next start does it: %s", error)
        self._connection.close()


class _Undone(Exception):
    """The only job of a transaction failed."""


def _closed() -> Unavailable:
    return Unavailable("the store is closed: the service is shutting down", retry_after=5.0)
