"""Data directories: what is refused and why, what is durable, and who may write."""

import fcntl
import os
import random
import sqlite3
import stat
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from service_simulation.disk import Disk, SimulatedDatabase, use_disk
from service_simulation.parts.support import declined, folder, refused, rows_of, synced
from service_simulation.reference import demand
from service_simulation.virtual import Clock, Still

from twinkle_server import failpoints
from twinkle_server.errors import StoreError
from twinkle_server.store import aside, base, filesystem, lease, open_store, opening, schema
from twinkle_server.store.inspection import DATABASE, PLACES, check_database, check_whole, damage, describe
from twinkle_server.store.lease import Owner
from twinkle_server.store.records import Checkpoint, Model, Session

OPEN = Path("/proc/self/fd")
"""Lists the open files of this process."""


def _open(data: Path, **options: Any) -> Any:
    use_disk(Disk(Still(1)))
    return open_store(data, database=SimulatedDatabase, **options)


def _contents(data: Path) -> dict[str, bytes]:
    return {
        path.relative_to(data).as_posix(): path.read_bytes()
        for path in data.rglob("*")
        if path.is_file() and not path.name.endswith("-shm")
    }


def _modes(data: Path) -> None:
    for path in data.rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        wanted = 0o700 if path.is_dir() else 0o600
        if not path.name.endswith(("-wal", "-shm")):
            demand(mode == wanted, f"{path} has the mode {mode:o}")
    demand(stat.S_IMODE(data.stat().st_mode) == 0o700, "the directory is open to others")


async def open_directories(clock: Clock, draw: random.Random) -> None:
    """A directory that is not whole is refused and stays as it is; a new one is made, and opened again."""
    with folder() as root:
        data = root / "new" / "data"
        with synced() as done:
            store = _open(data)
        demand("data" in done and any(name.startswith(".tmp") for name in done), f"{done} was synced")
        _modes(data)
        first, epoch, instance = store.secret, store.journal.context.epoch, store.instance
        demand(epoch == 1 and len(first) == 32 and len(instance) == 32, "a new directory")
        await store.sessions.create(Session("s", "ada", 1.0, 1.0))
        beside = _open(data, serve=False)
        demand(
            (beside.instance, beside.lease, beside.journal.context.epoch) == (instance, None, 0), "beside the service"
        )
        beside.close()
        declined(lambda: _open(data), "is served by process", str(os.getpid()), "2033-05-18", "choose another --data")
        declined(lambda: aside.set_aside(data), "a service is running on it")
        demand(store.lease is not None and store.lease.lock >= 0, "the lock")
        handle = store.lease.lock
        store.close()
        for files in (store.journal.payloads, store.journal.results):
            try:
                files._threads.submit(int)
                demand(False, "the threads that write files go on after the end")
            except RuntimeError:
                pass
        demand(
            store.lease.lock == -1 and not Path(f"/proc/self/fd/{handle}").exists(), "the lock is held after the end"
        )
        demand(rows_of(store, "SELECT released, epoch FROM lease") == [(1, 1)], "the lease is not given back")
        again = _open(data)
        demand((again.secret, again.instance, again.journal.context.epoch) == (first, instance, 2), "it is another one")
        demand((await again.sessions.get("ada", "s")).id == "s", "what was written is lost")
        again.close()
        await _set_aside(data, draw)


async def refuse_directories(clock: Clock, draw: random.Random) -> None:
    """A directory that is foreign, incomplete, damaged, newer or in use is refused, with words that say why."""
    with folder() as root:
        for wrong in draw.sample(_WRONGS, 6):
            await wrong(root / wrong.__name__, draw)


def _made(data: Path) -> None:
    _open(data).close()


async def _foreign_files(data: Path, draw: random.Random) -> None:
    data.mkdir()
    (data / ".hidden").write_text("")
    (data / "lost+found").mkdir()
    (data / "notes.txt").write_text("mine")
    declined(lambda: _open(data), "contains unrelated files ('notes.txt')")
    (data / "notes.txt").unlink()
    _open(data).close()
    (data / "notes.txt").write_text("mine")
    _open(data).close()


async def _missing(data: Path, draw: random.Random) -> None:
    _made(data)
    (data / "payloads" / "x").write_text("")
    (data / DATABASE).unlink()
    before = _contents(data)
    declined(
        lambda: _open(data),
        "is missing, but the directory holds 1 in payloads/, the file secret",
        "set-aside",
        "cp -a BACKUP/.",
    )
    demand(_contents(data) == before, "a directory that is refused was changed")
    demand(describe(data) == ["1 in payloads/", "the file secret"], f"{describe(data)}")
    (data / f"{DATABASE}-wal").write_bytes(b"x" * draw.choice([0, 32, 33]))
    size = (data / f"{DATABASE}-wal").stat().st_size
    demand((f"{DATABASE}-wal" in describe(data)) is (size > 32), f"a log of {size} bytes: {describe(data)}")
    demand(describe(data / "none") == [], "what is in no directory")


async def _empty(data: Path, draw: random.Random) -> None:
    _made(data)
    (data / DATABASE).write_bytes(b"")
    declined(lambda: _open(data), "is empty (0 bytes), but the directory holds the file secret")
    (data / "secret").unlink()
    for side in ("-wal", "-shm"):
        (data / f"{DATABASE}{side}").unlink(missing_ok=True)
    _open(data).close()
    (data / "secret").unlink()
    (data / DATABASE).unlink()
    with closing(sqlite3.connect(data / DATABASE)) as raw:
        raw.execute("CREATE TABLE x (a)")
        raw.execute("DROP TABLE x")
        raw.commit()
    check_database(data)
    (data / "secret").write_bytes(b"x" * 32)
    declined(lambda: check_database(data), "is an empty database, but the directory holds")


async def _foreign(data: Path, draw: random.Random) -> None:
    data.mkdir()
    with closing(sqlite3.connect(data / DATABASE)) as raw:
        raw.execute("CREATE TABLE photos (a)")
        raw.commit()
        declined(
            lambda: check_database(data),
            "not a database of this service (it has the table 'photos', and the table 'meta' is missing)",
        )
        for name in ("meta", "lease", "keys", "checkpoints", "models"):
            raw.execute(f"CREATE TABLE {name} (a)")
        raw.commit()
        declined(lambda: check_database(data), "'photos', and the table 'alembic_version' is missing")
        raw.execute("DROP TABLE photos")
        raw.commit()
        declined(lambda: check_database(data), "(the table 'alembic_version' is missing)")
    (data / DATABASE).write_bytes(b"this is no database at all, whatever its name says")
    declined(lambda: check_database(data), "is not an SQLite database, or its first page is damaged;")
    (data / DATABASE).unlink()
    (data / DATABASE).mkdir()
    declined(lambda: check_database(data), "must be a regular file")


async def _damaged(data: Path, draw: random.Random) -> None:
    store = _open(data)
    for number in range(60):
        await store.sessions.create(Session(f"s{number}", "ada", 1.0, 1.0, display_name="x" * 300))
    store.close()
    demand(damage(data / DATABASE) == [] and damage(data / DATABASE, full=True) == [], "a whole one is damaged")
    check_whole(data, full=True)
    file = data / DATABASE
    size = file.stat().st_size
    raw = bytearray(file.read_bytes())
    with closing(sqlite3.connect(file)) as opened_file:
        page = opened_file.execute("SELECT rootpage FROM sqlite_master WHERE name = 'sessions'").fetchone()[0]
    raw[4096 * (page - 1) : 4096 * page] = b"\xff" * 4096
    file.write_bytes(raw)
    demand(bool(damage(file)) and file.stat().st_size == size, "damage is not seen")
    declined(lambda: check_whole(data), "the database is damaged:", "set-aside", ".recover")
    declined(lambda: _open(data), "the database is damaged:")
    for path in data.glob("*.db-*"):
        path.unlink()
    raw[16:200] = b"\xff" * 184
    file.write_bytes(raw)
    declined(lambda: _open(data), "damaged")
    file.write_bytes(b"SQLite format 3\0" + b"\0" * 5000)
    declined(lambda: _open(data), "damaged")
    (data / f"{DATABASE}-journal").write_bytes(b"")


async def _never_whole(data: Path, draw: random.Random) -> None:
    from twinkle_server.store.inspection import _was_empty

    data.mkdir()
    journal = data / "j"
    magic = b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7"
    demand(not _was_empty(journal), "no journal says that there was nothing")
    for pages, size, head, empty in (
        (1, 20, magic, True),
        (0, 20, magic, True),
        (2, 20, magic, False),
        (1, 19, magic, False),
        (1, 20, b"x" * 8, False),
        (256, 20, magic, False),
    ):
        journal.write_bytes((head + b"\0" * 8 + pages.to_bytes(4))[:size] + (b"rest" if size == 20 else b""))
        demand(_was_empty(journal) is empty, f"a journal of {pages} pages")
    locked = data / DATABASE
    with closing(sqlite3.connect(locked, isolation_level=None)) as raw:
        raw.execute("CREATE TABLE x (a)")
    hot = data / f"{DATABASE}-journal"
    hot.write_bytes(magic + b"\0" * 8 + (1).to_bytes(4) + b"\0" * 492)
    check_database(data)  # the first transaction was never committed
    hot.write_bytes(magic + b"\0" * 8 + (2).to_bytes(4) + b"\0" * 492)
    declined(lambda: check_database(data), f"cannot read {locked}", "check the disk and the permissions")


async def _secrets(data: Path, draw: random.Random) -> None:
    _made(data)
    (data / "secret").chmod(0o644)
    with synced() as done:
        value = opening.read_secret(data)
    demand(stat.S_IMODE((data / "secret").stat().st_mode) == 0o600 and done == [], "others may read the secret")
    (data / "secret").write_bytes(b"x" * draw.choice([31, 33]))
    declined(lambda: opening.read_secret(data), "must have 32 bytes", "restore it from a backup")
    declined(lambda: _open(data), "must have 32 bytes")
    (data / "secret").unlink()
    with synced() as done:
        new = opening.read_secret(data)
    demand(
        new != value and len(done) == 2 and done[0].startswith(".tmp-") and done[1] == data.name, f"{done} was synced"
    )
    demand(not list(data.glob(".tmp*")), "something is left over")
    (data / "secret").unlink()

    def faster(place: str) -> None:
        if place == "secret.before_link":
            (data / "secret").write_bytes(b"y" * 32)

    before = failpoints.watch(faster)
    try:
        demand(opening.read_secret(data) == b"y" * 32, "the secret of a faster process does not hold")
    finally:
        failpoints.watch(before)


async def _owners(data: Path, draw: random.Random) -> None:
    store = _open(data)
    me = Owner.current()
    demand(
        (me.pid, me.started) == (os.getpid(), lease.started(os.getpid())) and me.started > 0 and bool(me.boot), f"{me}"
    )
    _, _, numbers = Path("/proc/self/stat").read_text("utf-8").rpartition(")")
    demand(me.started == int(numbers.split()[19]), f"{me.started} ticks; this process has {numbers}")
    ended = os.posix_spawn("/bin/true", ["true"], {})
    os.waitid(os.P_PID, ended, os.WEXITED | os.WNOWAIT)
    demand(lease.started(ended) is None, "a process that has ended, and is not reaped")
    os.waitpid(ended, 0)
    row = rows_of(store, "SELECT epoch, host, pid, started, boot, released, since FROM lease")[0]
    demand(row[:6] == (1, me.host, me.pid, me.started, me.boot, 0) and row[6] > 1.9e9, f"{row}")
    demand(lease.started(2**22 + 5) is None, "a process that is not there")
    with mock.patch.object(lease, "_BOOT", data / "none"):
        demand(lease._boot() == "" and Owner.current().boot == "", "a system that does not say when it was started")
    epoch = 1
    for owner, alive in (
        (replace(me, pid=os.getppid(), started=lease.started(os.getppid()) or 0), True),
        (replace(me, pid=os.getppid(), started=1), False),
        (replace(me, pid=2**22 + 1), False),
        (me, False),
        (replace(me, host="other", boot="b"), True),
        (replace(me, host="other"), False),
        (replace(me, boot="b"), False),
        (replace(me, boot="b", pid=os.getppid(), started=lease.started(os.getppid()) or 0), False),
        (replace(me, host="other", boot=""), True),
    ):
        epoch += 1
        taken = lease.take(store.database, data, -1, take_over=True, owner=owner)
        demand(taken.epoch == epoch, f"the epoch is {taken.epoch}, not {epoch}")
        if alive:
            where = "on another machine" if owner.host == "other" else "stop it first"
            declined(lambda: lease.take(store.database, data, -1), f"process {owner.pid} on {owner.host}", where)
        else:
            epoch += 1
            demand(lease.take(store.database, data, -1).epoch == epoch, "a dead owner is not replaced")
    other = lease.take(store.database, data, -1, take_over=True, owner=replace(me, host="other", boot=""))
    other.release(store.database)
    demand(lease.take(store.database, data, -1).epoch == epoch + 2, "a lease that was given back is held")
    lease.take(store.database, data, -1, take_over=True, owner=replace(me, host="other", boot="b"))
    lease.take(store.database, data, -1, owner=replace(me, boot=""), take_over=True)
    demand(
        lease.take(store.database, data, -1, owner=replace(me, boot="")).epoch == epoch + 5, "where no boot is known"
    )
    store.lease.release(store.database)
    demand(rows_of(store, "SELECT released FROM lease") == [(0,)], "a lease of another was given back")
    store.database.close()
    fresh = data / "fresh"
    fresh.mkdir()
    empty = SimulatedDatabase(fresh / DATABASE)
    handle = lease.lock(empty, fresh)
    demand(fcntl.fcntl(handle, fcntl.F_GETFD) & fcntl.FD_CLOEXEC != 0, "the lock outlives the process")
    demand(stat.S_IMODE((fresh / "lock").stat().st_mode) == 0o600, "the mode of the lock")
    declined(lambda: lease.lock(empty, fresh), "another process is opening")
    os.close(handle)
    empty.close()


async def _versions(data: Path, draw: random.Random) -> None:
    store = _open(data)
    work = store.database.write_now
    demand(work(schema.version) == schema.VERSIONS[-1], "the version of a new one")
    demand(work(lambda connection: schema.migrate(connection)) == schema.VERSIONS[-1], "it was of the newest version")
    old = draw.choice(schema.VERSIONS[:-1])
    demand(work(lambda connection: schema.migrate(connection, old)) == schema.VERSIONS[-1], "the version before")
    demand(work(schema.version) == old, "it did not go back")
    store.close()
    declined(lambda: _open(data, serve=False), f"the old version {old!r}; start `twinkle serve` once")
    again = _open(data)
    demand(again.database.write_now(schema.version) == schema.VERSIONS[-1], "it was not migrated")
    again.database.write_now(
        lambda connection: connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    )
    again.close()
    for serve in (True, False):
        declined(lambda serve=serve: _open(data, serve=serve), "has version '9999', which is newer than")
    empty = SimulatedDatabase(data / "empty.db")
    demand(empty.write_now(schema.version) is None, "the version of nothing")
    empty.write_now(lambda connection: schema.migrate(connection, schema.VERSIONS[0]))
    demand(empty.write_now(schema.version) == schema.VERSIONS[0], "an old version of nothing")
    empty.write_now(lambda connection: schema.migrate(connection, None))
    demand(empty.write_now(schema.version) is None, "the way back to nothing")
    empty.close()


async def _network(data: Path, draw: random.Random) -> None:
    data.mkdir()
    mounts = data / "mounts"
    shared = data / "share d"
    (shared / "local").mkdir(parents=True)
    escaped = str(shared).replace(" ", "\\040")
    mounts.write_text(
        f"1 0 0:1 / / rw - ext4 /dev/a rw\n2 1 0:2 / {escaped} rw shared:1 - nfs4 host:/x rw\n"
        f"3 2 0:3 / {escaped}/local rw - ext4 /dev/b rw\n4 1 0:4 / {shared.parent}/other rw - cifs //h rw\n"
    )
    filesystem.check_local(data, mounts)
    filesystem.check_local(shared / "local", mounts)
    filesystem.check_local(data, data / "none")
    declined(lambda: filesystem.check_local(shared, mounts), "is on a network file system (nfs4)", "choose a --data")
    (shared / "x").mkdir()
    (data / "link").symlink_to(shared / "x")
    declined(lambda: filesystem.check_local(data / "link", mounts), "(nfs4)")
    mounts.write_text(f"1 0 0:1 / {data} rw - ext4 /dev/a rw\n2 0 0:2 / {data} rw - nfs host:/x rw\n")
    declined(lambda: filesystem.check_local(data, mounts), "(nfs)")
    mounts.write_text(f"1 0 0:1 / / rw - ext4 /dev/a rw\n2 0 0:2 / {data} rw - nfs host:/x rw\n")
    with mock.patch.object(filesystem, "_kind", return_value="nfs"):
        declined(lambda: _open(data), "network file system")
        declined(lambda: SimulatedDatabase(data / DATABASE), "network file system")
    before = len(list(OPEN.iterdir()))
    with synced() as done:
        filesystem.sync_folder(data)
    demand(done == [data.name], f"{done} was synced")
    demand(before == len(list(OPEN.iterdir())), "a folder stays open")


async def _unusable(data: Path, draw: random.Random) -> None:
    data.write_text("a file")
    declined(lambda: _open(data), "cannot use", "choose another --data")
    data.unlink()
    _made(data)
    before = len(list(OPEN.iterdir()))
    (data / "secret").write_bytes(b"x")
    declined(lambda: _open(data), "must have 32 bytes")
    demand(len(list(OPEN.iterdir())) == before, "a start that fails leaves files open")
    (data / "secret").unlink()
    _open(data).close()


async def _base_models(data: Path, draw: random.Random) -> None:
    store = _open(data)
    names = iter(["a", "a", "a (commit 1)", "b", "b", "b", "c", "c", "d", "c"])
    with mock.patch.object(base, "_fingerprint", side_effect=names):
        check = lambda **options: base.check_base(store.database, "m", data, **options)  # noqa: E731
        recorded = lambda: rows_of(store, "SELECT value FROM meta WHERE name = 'base m'")  # noqa: E731
        await check()
        demand(recorded() == [("a",)], "the fingerprint is not recorded")
        await store.sessions.create(Session("s", "ada", 1.0, 1.0))
        from twinkle_server.store import models

        model = Model("s:train:0", "ada", "s", 0, "m", 8, 1.0, 1.0)
        await store.database.write(lambda connection: models.add(connection, model))
        await store.database.write(
            lambda connection: models.add(connection, replace(model, id="x", number=1, base="n"))
        )
        await check()
        await check()
        demand(recorded() == [("a (commit 1)",)], f"{recorded()}")
        words = "the 1 adapters and checkpoints of this directory belong to a model with the fingerprint a (commit 1)"
        await refused(check(), StoreError, words)
        demand(recorded() == [("a (commit 1)",)], "a model that is refused is recorded")
        await check(accept=True)
        demand(recorded() == [("b",)], "a model that is accepted is not recorded")
        await store.checkpoints.create(
            Checkpoint("ada", "s:train:0", "weights", "w", "checkpoints/w", 1, "", "m", 8, 1.0)
        )
        await check()
        await refused(check(), StoreError, "the 2 adapters")
        await store.models.gone("ada", "s:train:0", 2.0, "over")
        await refused(check(), StoreError, "the 1 adapters")
        for each in await store.checkpoints.surplus("ada", "s:train:0", "weights", 0, 5.0):
            demand(each.name == "w", "the surplus")
        await check()
        demand(recorded() == [("d",)], "where no adapter is left, another model may be served")
    with (
        mock.patch.object(base, "fingerprint", return_value="f"),
        mock.patch.object(base, "commit_of", return_value="c"),
    ):
        demand(base._fingerprint(data) == "f (commit c)", "how a model is described")
        with mock.patch.object(base, "commit_of", return_value=None):
            demand(base._fingerprint(data) == "f", "how a model is described")
    store.close()


_WRONGS: tuple[Callable[[Path, random.Random], Awaitable[None]], ...] = (
    _foreign_files,
    _missing,
    _empty,
    _foreign,
    _damaged,
    _never_whole,
    _secrets,
    _owners,
    _versions,
    _network,
    _unusable,
    _base_models,
)


async def _set_aside(data: Path, draw: random.Random) -> None:
    (data / "notes.txt").write_text("mine")
    (data / "payloads" / "p").write_text("payload")
    before = _contents(data)
    order: list[str] = []
    reached = failpoints.watch(lambda place: order.append(place) if place == "aside.before_move" else None)
    try:
        with synced() as done:
            target = aside.set_aside(data, 1e9)
    finally:
        failpoints.watch(reached)
    demand(target == data / "set-aside" / "20010909T014640Z", f"{target}")
    demand(len(order) >= 2 + len(PLACES) and done.count(target.name) == len(order) == done.count("data"), f"{done}")
    demand("set-aside" in done, "the new folder is not durable")
    demand(
        stat.S_IMODE(target.stat().st_mode) == 0o700 == stat.S_IMODE((data / "set-aside").stat().st_mode), "its mode"
    )
    kept = {name: text for name, text in before.items() if name not in ("notes.txt", "lock")}
    moved = _contents(target)
    demand(moved.keys() == kept.keys() and moved["payloads/p"] == b"payload", f"{moved.keys()} was moved")
    demand((data / "notes.txt").exists(), "what is not the service's was moved")
    declined(lambda: aside.set_aside(data, 1e9), "does not contain data of a service; check --data")
    with closing(sqlite3.connect(target / DATABASE)) as raw:
        demand(raw.execute("SELECT count(*) FROM sessions").fetchone() == (1,), "what was moved is lost")
    (data / "notes.txt").unlink()
    for name in ("20010909T014640Z-2", "20010909T014640Z-3"):
        _open(data).close()
        demand(aside.set_aside(data, 1e9).name == name, "what was moved before is overwritten")
    _open(data).close()
    demand(aside.set_aside(data).name.startswith("2033"), "the time of now")
    handle = os.open(data / "lock", os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(handle)
