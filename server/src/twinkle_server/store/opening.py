"""Opening the data folder: schema, lease, tables, and the secret.

The secret is 32 random bytes in a file that only its owner may read.
"""

import contextlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog
from sqlalchemy import Connection, select
from sqlalchemy.dialects import sqlite

from twinkle_server.errors import StoreError
from twinkle_server.failpoints import reach
from twinkle_server.ids import new_id
from twinkle_server.settings import Limits, Times
from twinkle_server.store import lease, schema
from twinkle_server.store.aside import ASIDE
from twinkle_server.store.checkpoints import Checkpoints
from twinkle_server.store.database import SqliteDatabase
from twinkle_server.store.figures import Figures, RolloutTable
from twinkle_server.store.filesystem import check_local, sync_folder
from twinkle_server.store.inspection import DATABASE, PLACES, SIDES, check_database, check_whole
from twinkle_server.store.journal import SqliteJournal
from twinkle_server.store.models import Models
from twinkle_server.store.recorded import Recorded
from twinkle_server.store.retention import Retention
from twinkle_server.store.samplers import Samplers
from twinkle_server.store.sessions import Sessions
from twinkle_server.store.tables import meta
from twinkle_server.store.tenants import Audit, Keys, UsageTable
from twinkle_server.store.views import Views

_SIZE: Final = 32
_log = structlog.get_logger(__name__)


def read_secret(data: Path) -> bytes:
    """Return the secret of a data folder; create it if it does not exist.

    Raises:
        StoreError: the file has another size.
    """
    path = data / "secret"
    if not path.exists():
        _create_secret(path)
    secret = path.read_bytes()
    if len(secret) != _SIZE:
        raise StoreError(
            f"{path} must have {_SIZE} bytes, got {len(secret)}; restore it from a backup, or remove it, which "
            f"invalidates existing download links and unfinished futures"
        )
    path.chmod(0o600)
    return secret


def _create_secret(path: Path) -> None:
    temporary = path.with_name(f".tmp-{secrets.token_hex(8)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(secrets.token_bytes(_SIZE))
        file.flush()
        os.fsync(file.fileno())
    reach("secret.before_link")
    with contextlib.suppress(FileExistsError):  # another process was faster; its secret is used
        path.hardlink_to(temporary)
    temporary.unlink()
    sync_folder(path.parent)


_OURS: Final = ("lock", "secret", "server.json", "lost+found", ASIDE, *SIDES, *PLACES)


@dataclass(slots=True)
class Store:
    """The open data folder.

    Attributes:
        data: the directory.
        secret: random bytes, the key of signatures (of request ids and links).
        instance: random id of this directory.
        database: runs transactions.
        journal: the operation log.
        retention: deletes old data.
        sessions: see `store.sessions`; likewise the other tables.
        lease: None if the store was opened beside a running server.
    """

    data: Path
    secret: bytes
    instance: str
    database: SqliteDatabase
    journal: SqliteJournal
    retention: Retention
    sessions: Sessions
    models: Models
    samplers: Samplers
    checkpoints: Checkpoints
    recorded: Recorded
    keys: Keys
    audit: Audit
    usage: UsageTable
    figures: Figures
    rollouts: RolloutTable
    views: Views
    lease: "lease.Lease | None"

    def close(self) -> None:
        """Release the lease, and close the database after queued writes; blocks."""
        self.journal.close()
        try:
            if self.lease is not None:
                self.lease.release(self.database)
        finally:
            self.database.close()


def open_store(
    data: Path,
    *,
    limits: Limits | None = None,
    times: Times | None = None,
    serve: bool = True,
    take_over: bool = False,
    database: type[SqliteDatabase] = SqliteDatabase,
) -> Store:
    """Open a data folder; a missing or empty one is initialized (mode 0700).

    Args:
        data: the directory.
        limits: the setting `small_bytes` is used.
        times: how long results are kept.
        serve: whether to take the lease, so that operations can be written; False opens the directory beside a running
            server, for keys and for inspection.
        take_over: whether to take the lease even from an owner on another machine, which must be dead.
        database: the class that opens the file.

    Raises:
        StoreError: it is on a network file system, of a newer version, or served by another process; or its database is
            missing, empty, foreign or damaged beside other data.
    """
    try:
        _prepare_folder(data)
        return _open(data, limits, times, serve, take_over, database)
    except OSError as error:
        raise StoreError(f"cannot use {data}: {error.strerror}; choose another --data") from error


def _open(
    data: Path, limits: Limits | None, times: Times | None, serve: bool, take_over: bool, kind: type[SqliteDatabase]
) -> Store:
    try:
        database = kind(data / DATABASE)
    except StoreError:
        check_whole(data)  # has a better message for a damaged database
        raise
    handle = -1
    try:
        if serve:
            handle = lease.lock(database, data)
            check_whole(data)
        before = database.write_now(lambda connection: _migrate(connection, serve))
        if before not in (None, schema.VERSIONS[-1]):
            _log.info("upgraded the database", before=before, after=schema.VERSIONS[-1])
        owned = lease.take(database, data, handle, take_over) if serve else None
        return _assemble(data, database, owned, limits, times)
    except BaseException:
        database.close()
        if handle >= 0:
            os.close(handle)
        raise


def _prepare_folder(data: Path) -> None:
    data.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_local(data)
    check_database(data)
    left = sorted(entry.name for entry in data.iterdir()) if not (data / DATABASE).exists() else []
    foreign = [name for name in left if name not in _OURS and not name.startswith(".")]
    if foreign:
        raise StoreError(f"{data} contains unrelated files ({foreign[0]!r}); choose an empty directory for --data")
    for name in PLACES:
        (data / name).mkdir(mode=0o700, exist_ok=True)
    sync_folder(data)


def _migrate(connection: Connection, serve: bool) -> str | None:
    """Bring the database to the version of this program; return its previous version."""
    before = schema.version(connection)
    if not serve and before is not None and before in schema.VERSIONS[:-1]:
        raise StoreError(f"the database has the old version {before!r}; start `twinkle serve` once to upgrade it")
    schema.migrate(connection)
    new = sqlite.insert(meta).values(name="instance", value=new_id())
    connection.execute(new.on_conflict_do_nothing())
    return before


def _assemble(
    data: Path, database: SqliteDatabase, owned: lease.Lease | None, limits: Limits | None, times: Times | None
) -> Store:
    secret = read_secret(data)
    journal = SqliteJournal(database, data, secret, owned.epoch if owned else 0, limits)
    return Store(
        data=data,
        secret=secret,
        instance=database.write_now(_instance),
        database=database,
        journal=journal,
        retention=Retention(database, journal, times),
        sessions=Sessions(database),
        models=Models(database),
        samplers=Samplers(database),
        checkpoints=Checkpoints(database),
        recorded=Recorded(database),
        keys=Keys(database),
        audit=Audit(database),
        usage=UsageTable(database),
        figures=Figures(database),
        rollouts=RolloutTable(database),
        views=Views(database),
        lease=owned,
    )


def _instance(connection: Connection) -> str:
    return str(connection.execute(select(meta.c.value).where(meta.c.name == "instance")).scalar_one())
