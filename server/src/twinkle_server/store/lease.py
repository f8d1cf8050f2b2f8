"""Who may write the operations of a data directory: one process, whose epoch stands in every write.

Two things decide: a lock of the kernel on the file `lock`, which ends with the process that holds it, and a row that
says who it is and which epoch it has. A process whose epoch is no longer the row's has been replaced, and cannot write.
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
    """A process, so that no other one can be taken for it.

    Attributes:
        host: name of its machine.
        pid: its number.
        started: clock ticks from the machine's start to its own; 0 where the system does not say.
        boot: random id of the machine's start; "" where the system does not say.
    """

    host: str
    pid: int
    started: int
    boot: str

    @classmethod
    def current(cls) -> "Owner":
        """Return this process."""
        return cls(platform.node(), os.getpid(), started(os.getpid()) or 0, _boot())


@dataclass(slots=True)
class Lease:
    """The right to write.

    Attributes:
        epoch: grows by one with every owner.
        lock: the locked file's descriptor.
    """

    epoch: int
    lock: int

    def release(self, database: SqliteDatabase) -> None:
        """Say that nobody holds it, and unlock; what another process may have taken since is left alone."""
        query = update(lease).where(lease.c.epoch == self.epoch).values(released=True)
        try:
            database.write_now(lambda connection: connection.execute(query))
        finally:
            self.drop()

    def drop(self) -> None:
        """Unlock only, as the death of this process would."""
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1


def lock(database: SqliteDatabase, data: Path) -> int:
    """Lock a data directory against other servers; returns the descriptor that holds the lock.

    Raises:
        StoreError: another process has it.
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
    """Take the lease of a data directory; a dead owner's on this machine is taken over at once.

    Args:
        database: of the directory, with the newest schema.
        data: the directory.
        handle: of `lock`.
        take_over: take it even from an owner on another machine.
        owner: who takes it; this process.

    Raises:
        StoreError: somebody has it.
    """
    who = owner or Owner.current()
    return Lease(database.write_now(lambda connection: _take(connection, data, who, take_over)), handle)


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
    """Check that an owner whose lock is free does not live, by its process; `_take`'s caller has the lock."""
    same_boot = row.boot == owner.boot and row.boot != ""
    if not same_boot and row.host != owner.host:
        raise StoreError(
            f"{_who(row, data)}, on another machine; stop it there, or start with --take-over if that machine is gone"
        )
    alive = same_boot and row.host == owner.host and row.pid != owner.pid and started(row.pid) == row.started
    if alive:
        raise StoreError(f"{_who(row, data)}: stop it first, or choose another --data")


def _held(connection: Connection, data: Path) -> str:
    row = connection.execute(select(lease)).one_or_none() if schema.version(connection) else None
    if row is None:
        return f"another process is opening {data}: choose another --data, or wait for it to end"
    return f"{_who(row, data)}: stop it first, or choose another --data"


def _who(row: Row[Any], data: Path) -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(row.since))
    return f"{data} is served by process {row.pid} on {row.host} since {since}"


def started(pid: int) -> int | None:
    """Return when a process was started, in clock ticks of this machine; None if it does not live or nobody says."""
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
