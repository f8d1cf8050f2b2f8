"""Checks that a data folder's database exists, belongs to this service, and is not damaged.

Nothing is written, so that a refused directory stays unchanged.
"""

import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final, Literal
from urllib.parse import quote

from twinkle_server.errors import StoreError
from twinkle_server.store.tables import metadata

DATABASE: Final = "twinkle.db"
SIDES: Final = ("twinkle.db-wal", "twinkle.db-shm", "twinkle.db-journal")
_LOG: Final = "twinkle.db-wal"
_LOG_HEADER: Final = 32
"""Size of a log without entries in bytes."""
_JOURNAL: Final = "twinkle.db-journal"
"""SQLite's rollback journal, which the first start creates while it switches to a write-ahead log."""
_JOURNAL_MAGIC: Final = b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7"
PLACES: Final = ("checkpoints", "snapshots", "payloads", "results", "trash")
_MAGIC: Final = b"SQLite format 3\0"
_FIRST: Final = ("meta", "lease", "keys", "checkpoints", "models")
"""Tables of every version of the schema."""
_LINES: Final = 5

Found = Literal["missing", "empty", "foreign", "ours"]


def check_database(data: Path) -> None:
    """Refuse a directory whose database is missing beside other data, or is not a database of this service.

    Args:
        data: the data folder, which may not exist yet.

    Raises:
        StoreError: says what the directory contains, and how to restore it or to start with an empty one.
    """
    state, reason = _classify(data / DATABASE)
    if state == "ours":
        return
    content = describe(data)
    if state in ("missing", "empty") and not content:
        return
    holds = f", but the directory holds {', '.join(content)}" if content else ""
    raise StoreError(f"cannot open {data}: {reason}{holds}; {remedy(data)}")


def damage(path: Path, *, full: bool = False) -> list[str]:
    """Return the errors that SQLite finds in a database file; empty if there are none.

    Args:
        path: of the file.
        full: whether to compare indexes with tables, too (`PRAGMA integrity_check`), which takes several times as long.
    """
    pragma = f"PRAGMA {'integrity_check' if full else 'quick_check'}({_LINES})"
    try:
        with _opened(path) as raw:
            lines = [str(line) for (text,) in raw.execute(pragma) for line in str(text).splitlines()]
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError as error:
        return [str(error)]
    return [] if lines == ["ok"] else lines


def check_whole(data: Path, *, full: bool = False) -> None:
    """Refuse a damaged database.

    Raises:
        StoreError: there is none, or it is damaged; says what SQLite found, and what to do.
    """
    if not (data / DATABASE).exists():
        raise StoreError(f"{data} has no {DATABASE}: no service has used it; give the folder of `twinkle serve --data`")
    try:
        lines = damage(data / DATABASE, full=full)
    except sqlite3.OperationalError as error:
        raise StoreError(f"cannot read {data / DATABASE}: {error}; check the disk and the permissions") from error
    if lines:
        more = f" ({len(lines)} findings)" if len(lines) > 1 else ""
        raise StoreError(
            f"cannot use {data / DATABASE}: the database is damaged: {' '.join(lines[0].split())}{more}; "
            f"{remedy(data)}, or try to save its rows with SQLite's own tool: `sqlite3 {data / DATABASE} .recover`"
        )


def remedy(data: Path) -> str:
    """Return what an operator can do about an unusable database."""
    return (
        "restore the whole directory from a backup (`twinkle server restore`, or stop the service, "
        f"`cp -a BACKUP/. {data}/`), or move what is there aside and start with an empty directory: "
        f"`twinkle server set-aside --data {data}`"
    )


def describe(data: Path) -> list[str]:
    """List the content of a directory beside its database, for messages; empty for a new directory."""
    content = []
    for place in PLACES:
        try:
            count = sum(1 for _ in (data / place).iterdir())
        except (FileNotFoundError, NotADirectoryError):
            continue
        if count:
            content.append(f"{count} in {place}/")
    if (data / "secret").exists():
        content.append("the file secret")
    log = data / _LOG  # a start that was killed before its first commit leaves an empty one, and other files beside it
    return content + ([_LOG] if log.exists() and log.stat().st_size > _LOG_HEADER else [])


def _classify(path: Path) -> tuple[Found, str]:
    """Return the state of a database file, and its description."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return "missing", f"{DATABASE} is missing"
    if not stat.S_ISREG(status.st_mode):
        return "foreign", f"{DATABASE} must be a regular file"
    with path.open("rb") as file:
        head = file.read(len(_MAGIC))
    if status.st_size == 0:
        return "empty", f"{DATABASE} is empty (0 bytes)"
    if head != _MAGIC:
        return "foreign", f"{DATABASE} is not an SQLite database, or its first page is damaged"
    try:
        with _opened(path) as raw:
            tables = {name for (name,) in raw.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.OperationalError as error:
        if _was_empty(path.with_name(_JOURNAL)):
            return "empty", f"{DATABASE} was never completely written"
        raise StoreError(f"cannot read {path}: {error}; check the disk and the permissions") from error
    except sqlite3.DatabaseError:
        return "ours", ""  # damaged; `check_whole` reports the details
    if not tables:
        return "empty", f"{DATABASE} is an empty database"
    if missing := [name for name in _FIRST if name not in tables] + ["alembic_version"] * (
        "alembic_version" not in tables
    ):
        others = sorted(tables - set(metadata.tables) - {"alembic_version", "sqlite_sequence"})
        has = f"it has the table {others[0]!r}, and " if others else ""
        return "foreign", f"{DATABASE} is not a database of this service ({has}the table {missing[0]!r} is missing)"
    return "ours", ""


def _was_empty(journal: Path) -> bool:
    """Return whether the database had no table before the transaction of a hot journal.

    A database of one page has no table, because each table has its own page.
    """
    try:
        with journal.open("rb") as file:
            head = file.read(20)
    except FileNotFoundError:
        return False
    return head.startswith(_JOURNAL_MAGIC) and len(head) == 20 and int.from_bytes(head[16:]) <= 1


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Open an existing file for reading, including its write-ahead log."""
    address = f"file:{quote(str(path))}?mode=ro"
    with closing(sqlite3.connect(address, uri=True, timeout=5.0, isolation_level=None)) as raw:
        yield raw
