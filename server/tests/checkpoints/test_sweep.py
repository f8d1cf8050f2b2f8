"""What no row speaks of goes, an hour later; everything else stays."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from twinkle_server.checkpoints.sweep import orphans, sweep
from twinkle_server.checkpoints.upkeep import Upkeep
from twinkle_server.engine.files import publish
from twinkle_server.errors import Unavailable
from twinkle_server.store.opening import open_store
from twinkle_server.store.records import Checkpoint
from twinkle_server.tenancy.issue import issue

HOUR = 3600.0


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


def test_only_what_is_old_and_unknown_goes(data: Path) -> None:
    now = time.time()
    assert not sweep(data, KEPT, now=now).entries
    swept = sweep(data, KEPT, now=now + HOUR + 60)
    left = {path.relative_to(data).as_posix() for path in data.rglob("*")}
    assert swept.entries == 6
    assert {"checkpoints/kept/weights", "snapshots/kept/weights", "payloads/kept", "twinkle.db"} <= left
    assert not [name for name in left if "orphan" in name or ".tmp" in name]
    assert not list(orphans(data, KEPT, now=now + 2 * HOUR))


def test_a_full_disk_is_swept_and_what_waits_for_its_row_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    try:
        for name in ("orphan", "unrecorded"):
            folder(tmp_path, f"snapshots/{name}")

        async def full(now: float) -> list[Checkpoint]:
            raise Unavailable("full")

        monkeypatch.setattr(store.checkpoints, "expire", full)
        upkeep = Upkeep(tmp_path, store.database, store.checkpoints, store.keys, store.retention)
        upkeep.held = lambda: {"snapshots/unrecorded"}
        asyncio.run(upkeep.run(time.time() + 2 * HOUR))
        assert [path.name for path in (tmp_path / "snapshots").iterdir()] == ["unrecorded"]
    finally:
        store.close()


def test_a_link_is_removed_and_not_followed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside")
    (outside / "file").write_bytes(b"x")
    (data / "checkpoints" / "link").symlink_to(outside)
    (data / "checkpoints" / "orphan" / "inner").symlink_to(outside)
    sweep(data, KEPT, now=time.time() + 2 * HOUR)
    assert (outside / "file").exists()
    assert not os.path.lexists(data / "checkpoints" / "link")
    assert not (data / "checkpoints" / "orphan").exists()


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
    sweep(data, KEPT, now=time.time() + 2 * HOUR)
    assert (path / "weights").read_bytes() == b"0123456789"


def test_nothing_there_is_no_trouble(tmp_path: Path) -> None:
    assert not sweep(tmp_path, set(), now=time.time() + 2 * HOUR).entries


def checkpoint(data: Path, number: int, **fields: object) -> Checkpoint:
    place = folder(data, f"checkpoints/{number}")
    made = {"tenant": "a", "run": "s:train:0", "kind": "weights", "name": str(number), "folder": place, "size": 10}
    return Checkpoint(**{**made, "digest": "", "base": "b", "rank": 8, "created": float(number), **fields})


def test_upkeep_ends_what_is_over_and_beyond_the_newest_k(tmp_path: Path) -> None:
    data, now = tmp_path / "data", time.time()
    store = open_store(data)

    async def story() -> list[object]:
        await issue(store, "a", quotas={"keep": 2})
        for number in range(4):
            await store.checkpoints.create(checkpoint(data, number))
        await store.checkpoints.create(checkpoint(data, 4, kind="sampler_weights", expires=now + 10))
        await store.checkpoints.create(checkpoint(data, 5, tenant="b", run="t:train:0"))
        upkeep = Upkeep(data, store.database, store.checkpoints, store.keys, store.retention)
        first = await upkeep.run(now)
        second = await upkeep.run(now + 2 * HOUR)
        left = [each.name for each in (await store.checkpoints.page("a", now)).rows]
        return [first.expired, first.surplus, first.swept.entries, second.expired, second.swept.entries, left]

    try:
        assert asyncio.run(story()) == [0, 2, 0, 1, 3, ["3", "2"]]
        assert sorted(path.name for path in (data / "checkpoints").iterdir()) == ["2", "3", "5"]
    finally:
        store.close()
