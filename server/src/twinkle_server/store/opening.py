"""Opening the data directory: schema, lease, secret, and the record stores together."""

from dataclasses import dataclass
from pathlib import Path

from twinkle_server.settings import Limits, Times
from twinkle_server.store.audit import Audit
from twinkle_server.store.checkpoints import Checkpoints
from twinkle_server.store.database import SqliteDatabase
from twinkle_server.store.journal import SqliteJournal
from twinkle_server.store.keys import Keys
from twinkle_server.store.lease import Lease
from twinkle_server.store.models import Models
from twinkle_server.store.retention import Retention
from twinkle_server.store.samplers import Samplers
from twinkle_server.store.sessions import Sessions
from twinkle_server.store.usage import UsageTable


@dataclass(slots=True)
class Store:
    """The open data directory.

    Attributes:
        data: the directory.
        secret: random bytes of this directory, for signatures (of request ids, of links).
        instance: random id of this directory.
        database: for transactions of one's own.
        journal: the log of operations.
        retention: what may be thrown away.
        sessions: see `store.sessions`; the others likewise.
        lease: None when the store was opened beside a running server.
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
    keys: Keys
    audit: Audit
    usage: UsageTable
    lease: Lease | None

    def close(self) -> None:
        """Give the lease back, and close the database; what was submitted before is written."""
        raise NotImplementedError


def open_store(
    data: Path,
    *,
    limits: Limits | None = None,
    times: Times | None = None,
    serve: bool = True,
    take_over: bool = False,
) -> Store:
    """Open a data directory; an empty or missing one is made (mode 0700).

    Args:
        data: the directory.
        limits: `small_bytes` counts.
        times: how long results are kept.
        serve: take the lease, so that operations can be written; False opens it beside a running server, for keys and
            for looking.
        take_over: take the lease even from an owner on another machine, of which you know that it is dead.

    Raises:
        StoreError: it is on a network file system, of a newer version, or served by another process.
    """
    raise NotImplementedError
