"""Tokens are added up by tenant, day and kind, and written once."""

import asyncio
from pathlib import Path

import pytest

from twinkle_server.store import tenants as module
from twinkle_server.store.opening import Store, open_store
from twinkle_server.store.records import Usage
from twinkle_server.store.tenants import UsageLog


@pytest.fixture
def store(tmp_path: Path):
    opened = open_store(tmp_path / "data")
    yield opened
    opened.close()


def test_what_was_gathered_is_written_once(store: Store, monkeypatch) -> None:
    monkeypatch.setattr(module.time, "time", lambda: 86400.0 * 2 + 5)

    async def story() -> list[Usage]:
        log = UsageLog(store.usage)
        await log.flush()
        for kind, tokens, tenant in (
            ("forward_backward", 10, "a"), ("forward", 5, "a"), ("sample", 7, "a"), ("optim_step", 0, "a"),
            ("save", 3, "a"), ("sample", 1, "b"),
        ):  # fmt: skip
            log.add(kind, tokens, tenant)
        await log.flush()
        await log.flush()
        log.add("sample", 1, "a")
        await log.flush()
        return await store.usage.between("a", "1970-01-01", "1971-01-01")

    found = asyncio.run(story())
    assert found == [Usage("a", "1970-01-03", "sampling_sample", 8), Usage("a", "1970-01-03", "training", 15)]


def test_what_cannot_be_written_is_kept(store: Store) -> None:
    class Full:
        """Takes nothing the first time."""

        def __init__(self) -> None:
            self.tries = 0

        async def add_all(self, rows: list[Usage]) -> None:
            self.tries += 1
            if self.tries == 1:
                raise OSError("full")
            await store.usage.add_all(rows)

    async def story() -> int:
        log = UsageLog(Full())  # type: ignore[arg-type]
        log.add("sample", 4, "a")
        with pytest.raises(OSError, match="full"):
            await log.flush()
        log.add("sample", 3, "a")
        await log.flush()
        return sum(used.tokens for used in await store.usage.between("a", "1970-01-01", "2999-01-01"))

    assert asyncio.run(story()) == 7


def test_what_may_have_been_written_is_not_written_again(store: Store) -> None:
    written = asyncio.Event()

    class Slow:
        """Writes, and answers late."""

        async def add_all(self, rows: list[Usage]) -> None:
            await store.usage.add_all(rows)
            written.set()
            await asyncio.sleep(60.0)

    async def story() -> int:
        log = UsageLog(Slow())  # type: ignore[arg-type]
        log.add("sample", 4, "a")
        ending = asyncio.create_task(log.flush())
        await asyncio.wait_for(written.wait(), 20.0)
        ending.cancel()
        await asyncio.wait([ending])
        assert log._tokens == {}
        return sum(used.tokens for used in await store.usage.between("a", "1970-01-01", "2999-01-01"))

    assert asyncio.run(story()) == 4
