"""Connections to SQLite: how they are opened, and what their errors mean to whoever asked for something."""

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Final, cast
from urllib.parse import quote

from sqlalchemy import Connection, Engine, NullPool, create_engine
from sqlalchemy.exc import DBAPIError

from twinkle_server.errors import BadRequest, Unavailable
from twinkle_server.store.faults import StoreError

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
    """Return the connection below SQLAlchemy's, for statements that must be cheap."""
    return cast(sqlite3.Connection, connection.connection.dbapi_connection)


def engine(connect: Callable[[], sqlite3.Connection]) -> Engine:
    """Return what makes SQLAlchemy's connections over those that `connect` opens; transactions are begun by hand."""
    return create_engine("sqlite://", creator=connect, poolclass=NullPool, isolation_level="AUTOCOMMIT")


def connect(path: Path, readonly: bool = False) -> sqlite3.Connection:
    """Open a file.

    Raises:
        StoreError: it is no database, or its file system does not do.
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
    raw.execute("PRAGMA auto_vacuum = INCREMENTAL")  # has effect in a new file only, before anything is written there
    mode = raw.execute("PRAGMA journal_mode = WAL").fetchone()[0]
    if mode != "wal":
        raise sqlite3.OperationalError(f"its file system does not support write-ahead logging (mode {mode!r})")
    raw.execute("PRAGMA synchronous = FULL")
    raw.execute(f"PRAGMA journal_size_limit = {64 * 2**20}")


def worded(error: Exception) -> Exception:
    """Return what callers get: `Unavailable` for faults of the disk, `BadRequest` for what no column can hold."""
    if isinstance(error, UnicodeEncodeError | OverflowError):
        return BadRequest("the request contains a number beyond 64 bits or text that is not Unicode")
    found: BaseException | None = error.orig if isinstance(error, DBAPIError) else error
    code = getattr(found, "sqlite_errorcode", None)
    if code is not None and code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        fault = Unavailable(
            "the service's database is damaged: its operator must restore it (`twinkle server check` says more)",
            retry_after=30.0,
        )
        fault.__cause__ = error
        return fault
    failed = isinstance(found, sqlite3.OperationalError) if code is None else code & 0xFF in _DISK
    closed = isinstance(found, sqlite3.ProgrammingError) and "closed database" in str(found)
    if failed or closed or isinstance(found, OSError | StoreError):
        fault = Unavailable("the store cannot write at the moment (disk full or failing): try again", retry_after=5.0)
        fault.__cause__ = error
        return fault
    return error
