"""Keys are found while the service runs, cost argon2 once, and are kept as hashes only."""

import asyncio
import re
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from twinkle_server.cli.server import main as server
from twinkle_server.errors import BadRequest, NotFound, Unavailable
from twinkle_server.store.opening import Store, open_store
from twinkle_server.tenancy import keys as module
from twinkle_server.tenancy.keys import Keyring, change, hash_key, issue, lookup, make_record, matches, new_key, revoke


@pytest.fixture
def store(tmp_path: Path):
    opened = open_store(tmp_path / "data")
    yield opened
    opened.close()


@pytest.fixture
def argon_runs(monkeypatch) -> list[str]:
    """Every key that argon2 was run for."""
    runs: list[str] = []
    real = matches

    def counted(key: str, hashed: str) -> bool:
        runs.append(key)
        return real(key, hashed)

    monkeypatch.setattr(module, "matches", counted)
    return runs


def test_a_key_is_256_bits_that_the_sdk_takes() -> None:
    found = {new_key() for _ in range(100)}
    assert len(found) == 100
    assert all(re.fullmatch(r"tml-[A-Za-z0-9_-]{43}", key) for key in found)


def test_what_is_stored_does_not_contain_the_key() -> None:
    key = new_key()
    record = make_record(key, "alice", "alice", "user", 0.0)
    said = repr(record)
    assert record.hash.startswith("$argon2id$")
    assert not any(key[start : start + 8] in said for start in range(4, 40))
    assert matches(key, record.hash)
    assert not matches(key[:-1] + "~", record.hash)
    assert not matches(key, "no hash")


def test_hashes_are_salted_and_lookups_are_not() -> None:
    key = new_key()
    assert hash_key(key) != hash_key(key)
    assert lookup(key) == lookup(key) != lookup(new_key())


def test_a_key_says_whose_it_is(store: Store) -> None:
    async def story() -> None:
        key = await issue(store, "alice", role="operator", tenant="lab", quotas={"adapters": 3})
        caller = await Keyring(store.keys.all).find(key)
        assert caller is not None
        assert (caller.tenant, caller.role, caller.quotas) == ("lab", "operator", {"adapters": 3})
        assert caller.key not in key

    asyncio.run(story())


def test_argon2_runs_once_for_a_key_and_never_for_a_guess(store: Store, argon_runs: list[str]) -> None:
    async def story() -> None:
        key = await issue(store, "alice")
        ring = Keyring(store.keys.all)
        assert all([await ring.find(key) for _ in range(5)])
        assert all(await asyncio.gather(*[ring.find(key) for _ in range(20)]))
        assert argon_runs == [key]
        guesses = [*(new_key() for _ in range(50)), "", "tml-", key[:-1], key + "a", key.upper(), "é" * 47]
        assert not any(await asyncio.gather(*map(ring.find, guesses)))
        assert argon_runs == [key]

    asyncio.run(story())


def test_many_first_uses_at_once_cost_one_run(store: Store, argon_runs: list[str]) -> None:
    async def story() -> None:
        key = await issue(store, "alice")
        ring = Keyring(store.keys.all)
        assert all(await asyncio.gather(*[ring.find(key) for _ in range(20)]))
        assert len(argon_runs) <= 2

    asyncio.run(story())


def test_guesses_read_the_table_seldom(store: Store) -> None:
    reads = 0

    async def load():
        nonlocal reads
        reads += 1
        return await store.keys.all()

    async def story() -> float:
        ring = Keyring(load)
        began = time.monotonic()
        for _ in range(5):
            await asyncio.gather(*[ring.find(new_key()) for _ in range(200)])
        return time.monotonic() - began

    seconds = asyncio.run(story())
    assert reads <= 2 + seconds / 0.1


def test_a_new_key_is_known_at_once_and_a_revoked_one_is_not_for_long(store: Store, monkeypatch) -> None:
    monkeypatch.setattr(module, "_FRESH", 0.05)

    async def story() -> None:
        ring = Keyring(store.keys.all)
        assert await ring.find(new_key()) is None
        key = await issue(store, "late")
        assert await ring.find(key) is not None
        await revoke(store, "late")
        await asyncio.sleep(0.06)
        assert await ring.find(key) is None
        again = await issue(store, "late")
        found = await ring.find(again)
        assert found is not None
        assert found.tenant == "late"
        assert await ring.find(key) is None

    asyncio.run(story())


def test_while_the_store_cannot_be_read_known_keys_count(store: Store, monkeypatch) -> None:
    monkeypatch.setattr(module, "_FRESH", 0.0)
    broken = False

    async def load():
        if broken:
            raise Unavailable("the disk fails")
        return await store.keys.all()

    async def story() -> None:
        nonlocal broken
        key = await issue(store, "alice")
        ring = Keyring(load)
        broken = True
        with pytest.raises(Unavailable):
            await ring.find(key)
        broken = False
        assert await ring.find(key)
        broken = True
        assert await ring.find(key)
        assert await ring.find(new_key()) is None

    asyncio.run(story())


def test_memory_of_verified_keys_is_bounded(store: Store, monkeypatch) -> None:
    monkeypatch.setattr(module, "_KEPT", 3)
    monkeypatch.setattr(module, "hash_key", lambda key: "weak")
    monkeypatch.setattr(module, "matches", lambda key, hashed: True)

    async def story() -> None:
        made = [await issue(store, f"k{number}") for number in range(6)]
        ring = Keyring(store.keys.all)
        for key in made:
            assert await ring.find(key)
        assert len(ring._verified) == 3

    asyncio.run(story())


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["", "a b", "../x", "-x", "x" * 65, "a\n", "é"])
def test_names_that_are_none_are_refused(store: Store, name: str) -> None:
    with pytest.raises(BadRequest, match="the name of a key or tenant must be"):
        asyncio.run(issue(store, name))
    with pytest.raises(BadRequest, match="the name of a key or tenant must be"):
        asyncio.run(issue(store, "fine", tenant=name or " "))


def test_a_name_is_taken_until_its_key_is_revoked(store: Store) -> None:
    async def story() -> None:
        await issue(store, "alice")
        with pytest.raises(BadRequest, match="key 'alice' already exists"):
            await issue(store, "alice")
        with pytest.raises(BadRequest, match="unknown quota"):
            await issue(store, "bob", quotas={"speed": 1})
        with pytest.raises(NotFound):
            await revoke(store, "bob")
        events = [entry.event for entry in await store.audit.entries("alice")]
        assert events == ["key.create"]

    asyncio.run(story())


def test_quotas_are_changed_in_place_and_the_change_is_in_the_audit(store: Store) -> None:
    async def story() -> None:
        await issue(store, "ana", quotas={"operations": 5, "keep": 2})
        ring = Keyring(store.keys.all)
        changed = await change(store, "ana", {"operations": 7, "keep": None, "weight": 2.5})
        assert changed.quotas == {"operations": 7, "weight": 2.5}
        assert (await store.keys.all())[0].quotas == changed.quotas
        assert ring._read == -float("inf"), "no service has read them yet"
        (entry,) = await store.audit.entries("ana", event="key.quotas")
        assert entry.details["before"] == {"operations": 5, "keep": 2}
        assert entry.details["after"] == {"operations": 7, "weight": 2.5}
        for wrong in (
            {"operatons": 1},
            {"operations": 0},
            {"keep": 1.5},
            {"weight": 1e9},
            {"operations": float("inf")},
        ):
            with pytest.raises(BadRequest):
                await change(store, "ana", wrong)
        with pytest.raises(NotFound):
            await change(store, "ben", {"keep": 1})
        await revoke(store, "ana")
        with pytest.raises(NotFound):
            await change(store, "ana", {"keep": 1})

    asyncio.run(story())


def test_a_running_service_has_changed_quotas_within_a_second(store: Store, monkeypatch) -> None:
    async def story() -> None:
        key = await issue(store, "ana", quotas={"operations": 5})
        ring = Keyring(store.keys.all)
        before = await ring.find(key)
        await change(store, "ana", {"operations": 9})
        later = time.monotonic() + 1.5
        monkeypatch.setattr(module.time, "monotonic", lambda: later)
        after = await ring.find(key)
        assert before is not None
        assert after is not None
        assert (before.quotas, after.quotas) == ({"operations": 5}, {"operations": 9})

    asyncio.run(story())


def test_the_list_of_keys_has_all_digits_of_their_quotas(tmp_path: Path) -> None:
    data = ["--data", str(tmp_path)]
    given = ["--bytes", "1234567890", "--weight", "0.25", "--tokens-per-second", "1000000"]
    assert CliRunner().invoke(server, ["keys", "create", "ana", *data, *given]).exit_code == 0
    listed = CliRunner().invoke(server, ["keys", "list", *data]).output.split()
    assert {"bytes=1234567890", "weight=0.25", "tokens_per_second=1000000"} <= set(listed)
