"""The lease of a data folder: one process may write its operations, and every write is fenced by its epoch.

The lease consists of a kernel lock on the file `lock`, which ends with its process, and a row with owner and epoch. A
process whose epoch differs from the row's has been replaced and cannot write.
"""

import fcntl
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Row, insert, select, update

from twinkle_server.errors import StoreError
from twinkle_server.store import schema
from twinkle_server.store.database import SqliteDatabase
from twinkle_server.store.tables import lease

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Owner:
    """Identifies a process unambiguously.

    Attributes:
        host: host name.
        pid: process id.
        started: clock ticks from boot to the start of the process; 0 if unknown.
        boot: boot id of the machine; "" if unknown.
    """

    host: str
    pid: int
    started: int
    boot: str

    @classmethod
    def current(cls) -> "Owner":
        """Return the current process."""
        return cls(platform.node(), os.getpid(), started(os.getpid()) or 0, _boot())


@dataclass(slots=True)
class Lease:
    """The right to write.

    Attributes:
        epoch: increases by one with every owner.
        lock: descriptor of the locked file.
    """

    epoch: int
    lock: int

    def release(self, database: SqliteDatabase) -> None:
        """Mark the lease as released, and unlock; a lease taken by another process is not changed."""
        query = update(lease).where(lease.c.epoch == self.epoch).values(released=True)
        try:
            database.write_now(lambda connection: connection.execute(query))
        finally:
            self.drop()

    def drop(self) -> None:
        """Only unlock, as the death of this process would."""
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1


def lock(database: SqliteDatabase, data: Path) -> int:
    """Lock a data folder against other servers, and return the descriptor that holds the lock.

    Raises:
        StoreError: another process holds the lock.
    """
    handle = os.open(data / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise StoreError(database.write_now(lambda connection: _held(connection, data))) from error
    return handle


def take(
    database: SqliteDatabase, data: Path, handle: int, take_over: bool = False, owner: Owner | None = None
) -> Lease:
    """Take the lease of a data folder; the lease of a dead owner on this machine is taken over immediately.

    Args:
        database: of the directory, with the newest schema.
        data: the directory.
        handle: of `lock`.
        take_over: whether to take the lease even from an owner on another machine.
        owner: the new owner; by default this process.

    Raises:
        StoreError: another process holds the lease.
    """
    current = owner or Owner.current()
    return Lease(database.write_now(lambda connection: _take(connection, data, current, take_over)), handle)


def _take(connection: Connection, data: Path, owner: Owner, take_over: bool) -> int:
    row = connection.execute(select(lease)).one_or_none()
    if row is not None and not take_over and not row.released:
        _check_dead(row, data, owner)
    epoch = 1 if row is None else int(row.epoch) + 1
    values = {
        "id": 1,
        "epoch": epoch,
        "host": owner.host,
        "pid": owner.pid,
        "started": owner.started,
        "boot": owner.boot,
        "since": time.time(),
        "released": False,
    }
    connection.execute(insert(lease).values(values) if row is None else update(lease).values(values))
    return epoch


def _check_dead(row: Row[Any], data: Path, owner: Owner) -> None:
    """Check that an owner without the lock is dead, by its process; the caller holds the lock."""
    same_boot = row.boot == owner.boot and row.boot != ""
    if not same_boot and row.host != owner.host:
        raise StoreError(
            f"{_describe(row, data)}, on another machine; stop it there, or start with --take-over if it no longer runs"
        )
    alive = same_boot and row.host == owner.host and row.pid != owner.pid and started(row.pid) == row.started
    if alive:
        raise StoreError(f"{_describe(row, data)}: stop it first, or choose another --data")


def _held(connection: Connection, data: Path) -> str:
    row = connection.execute(select(lease)).one_or_none() if schema.version(connection) else None
    if row is None:
        return f"another process is opening {data}: choose another --data, or wait for it to end"
    return f"{_describe(row, data)}: stop it first, or choose another --data"


def _describe(row: Row[Any], data: Path) -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(row.since))
    return f"{data} is served by process {row.pid} on {row.host} since {since}"


def started(pid: int) -> int | None:
    """Return the start time of a process in clock ticks of this machine; None if it is dead or this is unknown."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    after_name = text[text.rindex(")") + 2 :].split()
    return None if after_name[0] in "ZX" else int(after_name[19])


def _boot() -> str:
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return ""
