"""What a row named and no row names goes to the trash, an hour later; what no row ever named stays."""

import asyncio
import errno
import os
import shutil
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from twinkle_server.checkpoints.trash import Trash, size_of
from twinkle_server.checkpoints.upkeep import Swept, Upkeep, UpkeepReport, orphans, sweep, unreferenced
from twinkle_server.cli.server import main as server
from twinkle_server.engine.files import publish
from twinkle_server.errors import Unavailable
from twinkle_server.ids import CheckpointPath
from twinkle_server.store import folders
from twinkle_server.store.opening import Store, open_store
from twinkle_server.store.records import Checkpoint
from twinkle_server.tenancy.keys import issue

HOUR = 3600.0
DAY = 24 * HOUR


def folder(data: Path, name: str) -> str:
    """Publish a folder with a file of ten bytes."""
    publish(data / name, lambda work: (work / "weights").write_bytes(b"0123456789"))
    return name


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name in ("checkpoints/kept", "checkpoints/orphan", "snapshots/kept", "snapshots/orphan", "checkpoints/.tmp-1"):
        folder(tmp_path, name)
    for name in ("payloads/kept", "payloads/orphan", "results/orphan", "payloads/.tmp-2"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "twinkle.db").write_bytes(b"x")
    return tmp_path


KEPT = {"checkpoints/kept", "snapshots/kept", "payloads/kept", "checkpoints/.tmp-1"}
NAMED = KEPT | {"checkpoints/orphan", "snapshots/orphan", "payloads/orphan", "results/orphan"}


def swept_at(data: Path, now: float, named: set[str] | None = None) -> Swept:
    """Sweep, with a place in the trash until a day later."""
    return sweep(data, KEPT, NAMED if named is None else named, lambda folder: now + DAY, now=now)


def names(data: Path) -> set[str]:
    return {path.relative_to(data).as_posix() for path in data.rglob("*")}


def test_only_what_is_old_and_was_named_goes_to_the_trash(data: Path) -> None:
    now = time.time()
    assert not swept_at(data, now).entries
    swept = swept_at(data, now + HOUR + 60)
    left = {name for name in names(data) if not name.startswith("trash")}
    assert swept.entries == 6
    assert {"checkpoints/kept/weights", "snapshots/kept/weights", "payloads/kept", "twinkle.db"} <= left
    assert not [name for name in left if "orphan" in name or ".tmp" in name]
    trashed = {entry.folder: entry for entry in Trash(data).entries()}
    drafts = {"checkpoints/.tmp-1", "payloads/.tmp-2"}
    assert set(trashed) == drafts | {"checkpoints/orphan", "snapshots/orphan", "payloads/orphan", "results/orphan"}
    entry = trashed["checkpoints/orphan"]
    assert entry.until == int(now + HOUR + 60 + DAY)
    assert (data / "trash" / entry.name / "weights").read_bytes() == b"0123456789"
    assert not list(unreferenced(data, KEPT, now=now + 2 * HOUR))


def test_what_no_row_ever_named_stays_and_is_told(data: Path) -> None:
    later = time.time() + 2 * HOUR
    assert swept_at(data, later, named=KEPT).entries == 2, "the drafts"
    assert {"checkpoints/orphan/weights", "snapshots/orphan/weights", "payloads/orphan"} <= names(data)
    found = orphans(data, KEPT, KEPT, now=later)
    assert {each.folder for each in found} == NAMED - KEPT
    assert {each.folder: each.size for each in found}["payloads/orphan"] == 1


def test_a_link_is_moved_and_not_followed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside")
    (outside / "file").write_bytes(b"x")
    (data / "checkpoints" / "link").symlink_to(outside)
    (data / "checkpoints" / "orphan" / "inner").symlink_to(outside)
    swept_at(data, time.time() + 2 * HOUR, NAMED | {"checkpoints/link"})
    trash = Trash(data)
    trashed = list(trash.entries())
    assert {"checkpoints/link", "checkpoints/orphan"} <= {entry.folder for entry in trashed}
    assert all(trash.remove(entry) for entry in trashed)
    assert (outside / "file").exists()
    assert not os.path.lexists(data / "checkpoints" / "link")
    assert not list((data / "trash").iterdir())


def test_what_is_replaced_in_the_meantime_stays(data: Path, monkeypatch) -> None:
    path, lstat, replaced = data / "checkpoints" / "orphan", Path.lstat, []

    def replace_after(self: Path):
        found = lstat(self)
        if self == path and not replaced:
            replaced.append(True)
            path.rename(data / "moved")
            folder(data, "checkpoints/orphan")
        return found

    monkeypatch.setattr(Path, "lstat", replace_after)
    swept_at(data, time.time() + 2 * HOUR)
    assert (path / "weights").read_bytes() == b"0123456789"


def test_nothing_there_is_no_trouble(tmp_path: Path) -> None:
    assert not swept_at(tmp_path, time.time() + 2 * HOUR).entries
    assert not list(Trash(tmp_path).entries())


def checkpoint(data: Path, number: int, **fields: object) -> Checkpoint:
    place = folder(data, f"checkpoints/{number}")
    made = {"tenant": "a", "run": "s:train:0", "kind": "weights", "name": str(number), "folder": place, "size": 10}
    return Checkpoint(**{**made, "digest": "", "base": "b", "rank": 8, "created": float(number), **fields})


def upkeep_of(store: Store, kept: float = DAY) -> Upkeep:
    return Upkeep(store.data, store.database, store.checkpoints, store.keys, store.retention, kept)


def in_place(data: Path) -> list[str]:
    return sorted(path.name for path in (data / "checkpoints").iterdir())


def test_a_full_disk_is_given_the_trash_and_what_waits_for_its_row_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    try:
        for name in ("named", "unrecorded", "unknown"):
            folder(tmp_path, f"snapshots/{name}")
        store.database.write_now(lambda connection: folders.name(connection, "snapshots/named", 0.0))

        async def full(now: float) -> list[Checkpoint]:
            raise Unavailable("full") from OSError(errno.ENOSPC, "full")

        monkeypatch.setattr(store.checkpoints, "expire", full)
        upkeep = upkeep_of(store)
        upkeep.held = lambda: {"snapshots/unrecorded"}
        done = asyncio.run(upkeep.run(time.time() + 2 * HOUR))
        assert sorted(path.name for path in (tmp_path / "snapshots").iterdir()) == ["unknown", "unrecorded"]
        assert (done.swept.entries, done.emptied.entries, done.orphans.entries) == (1, 1, 1)
    finally:
        store.close()


def test_on_a_full_disk_the_trash_is_emptied_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    trash = Trash(tmp_path)
    for name, until in (("late", 3_000_000_000), ("soon", 1_000_000_002), ("sooner", 1_000_000_001)):
        folder(tmp_path, f"checkpoints/{name}")
        trash.put(tmp_path / f"checkpoints/{name}", until)
    missing = [0]

    def usage(path: Path) -> tuple[int, int, int]:
        """Return a disk of 1 TiB of which some entries of the trash take what is left."""
        free = 2**28 - missing[0] + 2**20 * (3 - len(list(trash.entries())))
        return shutil._ntuple_diskusage(2**40, 2**40 - free, free)  # type: ignore[attr-defined,no-any-return]

    monkeypatch.setattr(shutil, "disk_usage", usage)

    def left() -> list[str]:
        return [entry.folder.partition("/")[2] for entry in trash.entries()]

    try:
        upkeep = upkeep_of(store)
        assert asyncio.run(upkeep.make_room()).entries == 0
        assert len(left()) == 3, "256 MiB are enough"
        missing[0] = 1
        assert asyncio.run(upkeep.make_room()).entries == 1
        assert left() == ["soon", "late"]
        missing[0] = 2**20 + 1
        assert asyncio.run(upkeep.run(1e9)).emptied.entries == 1
        assert left() == ["late"]
    finally:
        store.close()


def test_what_another_process_removes_meanwhile_is_no_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`twinkle server trash empty` beside the service: both finish what the other began."""
    folder(tmp_path, "checkpoints/0")
    trash = Trash(tmp_path)
    trash.put(tmp_path / "checkpoints/0", 1.0)
    (entry,) = trash.entries()
    rename = Path.rename

    def raced(path: Path, target: Path) -> Path:
        moved = rename(path, target)
        Trash(tmp_path).finish()
        return moved

    monkeypatch.setattr(Path, "rename", raced)
    assert trash.remove(entry)
    assert list((tmp_path / "trash").iterdir()) == []


def test_a_disk_that_fails_otherwise_keeps_the_trash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    try:
        folder(tmp_path, "snapshots/named")
        store.database.write_now(lambda connection: folders.name(connection, "snapshots/named", 0.0))

        async def failing(now: float) -> list[Checkpoint]:
            raise Unavailable("failing") from OSError(errno.EIO, "failing")

        monkeypatch.setattr(store.checkpoints, "expire", failing)
        done = asyncio.run(upkeep_of(store).run(time.time() + 2 * HOUR))
        assert (done.swept.entries, done.emptied.entries) == (1, 0)
    finally:
        store.close()


def test_upkeep_ends_what_is_over_and_beyond_the_newest_k(tmp_path: Path) -> None:
    data, now = tmp_path / "data", time.time()
    store = open_store(data)

    async def story() -> list[object]:
        await issue(store, "a", quotas={"keep": 2})
        for number in range(4):
            await store.checkpoints.create(checkpoint(data, number))
        await store.checkpoints.create(checkpoint(data, 4, kind="sampler_weights", expires=now + 10))
        await store.checkpoints.create(checkpoint(data, 5, tenant="b", run="t:train:0"))
        upkeep = upkeep_of(store)
        first = await upkeep.run(now)
        second = await upkeep.run(now + 2 * HOUR)
        left = [each.name for each in (await store.checkpoints.page("a", now)).rows]
        return [first.expired, first.surplus, first.swept.entries, second.expired, second.swept.entries, left]

    try:
        assert asyncio.run(story()) == [0, 2, 0, 1, 3, ["3", "2"]]
        assert in_place(data) == ["2", "3", "5"]
        assert sorted(entry.folder for entry in Trash(data).entries()) == [f"checkpoints/{n}" for n in (0, 1, 4)]
    finally:
        store.close()


def test_the_trash_is_emptied_after_the_time_that_is_set(tmp_path: Path) -> None:
    now = time.time() + 2 * HOUR
    store = open_store(tmp_path)

    async def story() -> list[tuple[int, int]]:
        await store.checkpoints.create(checkpoint(tmp_path, 0))
        await store.checkpoints.delete("a", CheckpointPath("s:train:0", "weights", "0"), 1.0)
        upkeep = upkeep_of(store, kept=3 * HOUR)
        rounds = [await upkeep.run(at) for at in (now, now + 3 * HOUR - 60, now + 3 * HOUR + 60)]
        return [(each.swept.entries, each.emptied.entries) for each in rounds]

    try:
        assert asyncio.run(story()) == [(1, 0), (0, 0), (0, 1)]
        assert not list((tmp_path / "trash").iterdir())
        assert asyncio.run(folders.all_named(store.database)) == set(), "what is gone is forgotten"
    finally:
        store.close()


def test_a_database_that_never_knew_the_checkpoints_lets_upkeep_remove_none_of_them(tmp_path: Path) -> None:
    """As after the loss of `twinkle.db`: 56 checkpoints of another database."""
    for number in range(56):
        folder(tmp_path, f"checkpoints/{number}")
    (tmp_path / "set-aside").mkdir()
    shutil.move(tmp_path / "checkpoints", tmp_path / "set-aside")
    store = open_store(tmp_path)
    try:
        (tmp_path / "checkpoints").rmdir()
        shutil.move(tmp_path / "set-aside" / "checkpoints", tmp_path)
        done = asyncio.run(upkeep_of(store).run(time.time() + 30 * DAY))
        assert (done.swept.entries, done.orphans.entries) == (0, 56)
        assert len(in_place(tmp_path)) == 56
        status = CliRunner().invoke(server, ["orphans", "remove", "--all", "--data", str(tmp_path)])
        assert "moved 0 to the trash" in status.output, "they are younger than an hour"
    finally:
        store.close()


def test_the_trash_of_a_tenant_is_not_larger_than_its_quota(tmp_path: Path) -> None:
    now = time.time() + 2 * HOUR
    store = open_store(tmp_path)

    async def story() -> UpkeepReport:
        folder(tmp_path, "checkpoints/measured")
        size = size_of(tmp_path / "checkpoints/measured") or 0
        await issue(store, "a", quotas={"bytes": 2 * size + 1})
        await issue(store, "b")
        for number in range(4):
            await store.checkpoints.create(checkpoint(tmp_path, number, tenant="a"))
            await store.checkpoints.delete("a", CheckpointPath("s:train:0", "weights", str(number)), 1.0)
        for number in (7, 8, 9):
            await store.checkpoints.create(checkpoint(tmp_path, number, tenant="b", run="t:train:0"))
            await store.checkpoints.delete("b", CheckpointPath("t:train:0", "weights", str(number)), 1.0)
        return await upkeep_of(store).run(now)

    try:
        done = asyncio.run(story())
        assert (done.swept.entries, done.emptied.entries) == (7, 2)
        left = {entry.folder for entry in Trash(tmp_path).entries()}
        assert {f"checkpoints/{number}" for number in (7, 8, 9)} <= left
    finally:
        store.close()
