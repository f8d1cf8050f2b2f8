"""The service with its tables: what operations leave behind there, and what becomes of sessions."""

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from server_runtime import SOON, FakeEngine, Plan, answer, applied, within

from twinkle_server.errors import Gone, Unavailable
from twinkle_server.ids import CheckpointPath
from twinkle_server.operations import Accepted, Create, Future, Kind, Load, Outcome, Save, Submission
from twinkle_server.runtime.service import Service
from twinkle_server.settings import Settings, Times
from twinkle_server.store import models
from twinkle_server.store.opening import Store, open_store
from twinkle_server.store.records import AuditEntry, Model, Session

QUEUE = "s:train:0"
Body = Callable[["AppState"], Awaitable[None]]


class AppState:
    """A service on a data folder, and a client."""

    def __init__(self, data: Path, plan: Plan, times: Times) -> None:
        self.settings = Settings("fake", data, times=times)
        self.plan = plan
        self.store: Store = open_store(data, times=times)
        self.service = Service(self.settings, self.store, None, self._engine)
        self.number = 0

    async def _engine(self, first: bool) -> FakeEngine:
        self.engine = FakeEngine(self.plan)
        return self.engine

    async def begin(self, session: str = "s", **create: Any) -> Future:
        """Make a session and a model in it."""
        now = time.time()
        await self.store.sessions.create(Session(session, "ada", now, now))
        model = Model(f"{session}:train:0", "ada", session, 0, "fake", 8, now, now)
        self.number = 0
        return await self.do(
            "create", Create(8, 1, **create).dump(), in_transaction=lambda connection: models.add(connection, model)
        )

    async def ask(
        self, kind: Kind, payload: bytes = b"{}", in_transaction: Callable[[Any], None] | None = None
    ) -> Accepted:
        accepted = await self.service.submit(Submission("ada", QUEUE, kind, payload, self.number), in_transaction)
        self.number += 1
        return accepted

    async def do(
        self, kind: Kind, payload: bytes = b"{}", in_transaction: Callable[[Any], None] | None = None
    ) -> Future:
        return await answer(self.service, (await self.ask(kind, payload, in_transaction)).request)

    async def status(self) -> str:
        return (await self.store.models.get("ada", QUEUE)).status


@asynccontextmanager
async def house(data: Path, plan: Plan | None = None, times: Times | None = None) -> Any:
    made = AppState(data, plan or Plan(), times or Times())
    try:
        await made.service.start()
        yield made
        await made.service.drain()
    finally:
        await made.service.close()
        made.store.close()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(SOON):
        while not await condition():
            await asyncio.sleep(0.01)


def _folder(letter: str) -> str:
    return f"checkpoints/{letter * 32}"


def said(future: Future) -> dict[str, Any]:
    assert future.result is not None, future.error
    found: dict[str, Any] = json.loads(future.result)
    return found


def test_a_created_model_lives_and_a_failed_one_is_gone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path / "a") as at:
            assert said(await at.begin()) == {"type": "create_model", "model_id": QUEUE}
            assert await at.status() == "live"
        async with house(tmp_path / "b", Plan(poison=frozenset({0}))) as at:
            assert (await at.begin()).category == "server"
            assert "its creation failed" in str((await at.do("forward")).error)
            assert await at.status() == "gone"

    within(SOON, scenario)


def test_a_model_from_a_checkpoint_answers_as_loaded_and_is_snapshotted_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as at:
            path = "tinker://other/weights/one"
            told = await at.begin(source=_folder("a"), path=path)
            assert said(told) == {"type": "load_weights", "model_id": QUEUE, "path": path}
            told = await at.do("load", Load(_folder("a"), path).dump())
            assert said(told) == {"type": "load_weights", "model_id": QUEUE, "path": path}
            await until(lambda: _has_snapshot(at))

    within(SOON, scenario)


async def _has_snapshot(at: AppState) -> bool:
    return await at.store.journal.snapshot(QUEUE) is not None


def test_a_save_has_a_row_and_its_name_is_taken(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as at:
            await at.begin()
            save = Save(_folder("a"), "weights", name="one", ttl=3600, metadata={"step": "1"})
            path = f"tinker://{QUEUE}/weights/one"
            assert said(await at.do("save", save.dump())) == {"type": "save_weights", "path": path}
            row = await at.store.checkpoints.get("ada", CheckpointPath.parse(path), time.time())
            assert (row.folder, row.rank, row.has_optimizer, row.metadata) == (_folder("a"), 8, True, {"step": "1"})
            assert row.expires is not None
            again = await at.do("save", Save(_folder("b"), "weights", name="one").dump())
            assert (again.status, again.category) == ("failed", "user")
            assert "already exists" in str(again.error)
            assert applied(await at.do("forward_backward"))[-1] == 3
            await at.do("save", Save(_folder("c"), "weights", name="one", overwrite=True).dump())
            row = await at.store.checkpoints.get("ada", CheckpointPath.parse(path), time.time())
            assert row.folder == _folder("c")

    within(SOON, scenario)


def test_saves_for_samplers_make_sampling_sessions_and_inflight_ones_move(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as at:
            await at.begin()
            frozen = Save(_folder("a"), "sampler_weights", sampler="s:sample:0")
            told = said(await at.do("save", frozen.dump()))
            assert told == {"type": "save_weights_for_sampler", "sampling_session_id": "s:sample:0"}
            for number, letter in ((1, "b"), (2, "c")):
                moving = Save(_folder(letter), "sampler_weights", sampler=f"s:sample:{number}", inflight=True)
                await at.do("save", moving.dump())
            folders = [row.folder for row in await at.store.samplers.of_session("ada", "s")]
            assert folders == [_folder("a"), _folder("c"), _folder("c")]
            sample = Submission(
                "ada", "s:sample:1", "sample", json.dumps({"tokens": [1], "inflight": QUEUE}).encode(), 7
            )
            told = await answer(at.service, (await at.service.submit(sample)).request)
            assert _folder("c") in said(told)["asked"]

    within(SOON, scenario)


def test_external_weights_say_their_size(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as at:
            await at.begin()
            told = said(await at.do("save", Save(_folder("a"), "external_weights", name="x").dump()))
            assert told == {
                "type": "save_weights_external",
                "path": f"tinker://{QUEUE}/external_weights/x",
                "size_bytes": 0,
            }

    within(SOON, scenario)


def test_an_unloaded_model_is_gone_with_its_snapshots_also_after_a_restart(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path, Plan(snapshot_every=1)) as at:
            await at.begin()
            await at.do("forward_backward")
            await until(lambda: _has_snapshot(at))
            snapshot = await at.store.journal.snapshot(QUEUE)
            folder = tmp_path / snapshot.folder
            folder.mkdir(parents=True)
            assert said(await at.do("unload")) == {"type": "unload_model", "model_id": QUEUE}
            await at.service.outcomes.flush()
            assert not folder.exists()
            assert await at.status() == "gone"
        async with house(tmp_path) as at:
            at.number = 3
            told = await at.do("forward")
            assert (told.error, told.category) == ("this model no longer exists: it was unloaded", "user")

    within(SOON, scenario)


def test_a_model_that_cannot_be_made_again_says_so_and_is_tried_again_by_the_next_service(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path, Plan(unreadable=True, snapshot_every=1)) as at:
            await at.begin()
            await at.do("save", Save(_folder("a"), "weights", name="good").dump())
            await until(lambda: _has_snapshot(at))
            disk = at.plan.disk
        async with house(tmp_path, Plan(unreadable=True, disk=disk)) as at:
            at.number = 2
            told = await at.do("forward")
            assert told.category == "server"
            assert f"its last good checkpoint is tinker://{QUEUE}/weights/good" in str(told.error)
            await at.service.outcomes.flush()
            assert await at.status() == "corrupted"
            assert (await at.do("forward")).error == told.error
        async with house(tmp_path, Plan(disk=disk)) as at:
            at.number = 4
            assert applied(await at.do("forward_backward")) == [1, 4]
            assert await at.status() == "live"

    within(SOON, scenario)


@pytest.mark.full
def test_what_a_model_did_is_kept_until_it_is_given_up_for_good(tmp_path: Path) -> None:
    async def scenario() -> None:
        times = Times(kept_run=1.0, session=0.2)
        async with house(tmp_path, Plan(stubborn=frozenset({2}), snapshot_every=100), times) as at:
            await at.begin()
            for _ in range(2):
                asked = await at.ask("forward_backward")
                await answer(at.service, asked.request)
            at.engine.kill()
            assert "operation 2 failed when it was repeated" in str((await at.do("forward")).error)
            await at.service.outcomes.flush()
            await at.service._purge()
            kept = [row for row in await at.store.journal.after(QUEUE, 0) if row.status == "done"]
            assert [await at.store.journal.payload(row.id) for row in kept] == [b"{}", b"{}"]
            await until(lambda: _is(at, "gone"))
            await at.service._purge()
            for row in kept:
                with pytest.raises(LookupError):
                    await at.store.journal.payload(row.id)

    within(SOON, scenario)


def test_while_the_disk_takes_no_outcome_chores_go_on_and_no_snapshot_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with house(tmp_path, Plan(snapshot_every=1)) as at:
            await at.begin()
            finish, full = at.store.journal.finish, asyncio.Event()

            async def fails(outcomes: Sequence[Outcome]) -> list[Outcome]:
                if not full.is_set():
                    raise Unavailable("full")
                return await finish(outcomes)

            monkeypatch.setattr(at.store.journal, "finish", fails)
            waits = await at.ask("forward_backward")
            async with asyncio.timeout(SOON):
                while at.service.outcomes.trouble is None or not at.service.unrecorded:
                    await asyncio.sleep(0.001)
                await at.service._drop_idle()
            assert list(at.service._upkeep.held()) == list(at.plan.disk)[-1:]
            full.set()
            assert (await answer(at.service, waits.request)).status == "done"
            await at.service.outcomes.flush()
            assert not at.service.unrecorded
            assert await _has_snapshot(at)

    within(SOON, scenario)


def test_old_entries_of_the_audit_log_go(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path, times=Times(kept_audit=100.0)) as at:
            now = time.time()
            for age in (200.0, 50.0):
                await at.store.audit.record(AuditEntry(now - age, "ada", "login"))
            await at.service._purge()
            assert [entry.time for entry in await at.store.audit.entries("ada")] == [now - 50.0]

    within(SOON, scenario)


@pytest.mark.full
def test_a_silent_session_expires_and_its_model_can_still_be_used(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path, times=Times(session=0.3)) as at:
            await at.begin()
            await at.do("forward_backward")
            await at.service.heartbeat("s", "ada")
            assert await at.status() == "live"
            await until(lambda: _is(at, "detached"))
            assert at.plan.detached == [QUEUE]
            with pytest.raises(Gone):
                await at.service.heartbeat("s", "ada")
            assert applied(await at.do("forward_backward")) == [1, 2]
            assert at.plan.runs[-1][1] == 2

    within(SOON, scenario)


@pytest.mark.full
def test_heartbeats_keep_a_session_and_an_unknown_one_is_gone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path, times=Times(session=0.4)) as at:
            await at.begin()
            for _ in range(20):
                await at.service.heartbeat("s", "ada")
                await asyncio.sleep(0.05)
            assert await at.status() == "live"
            for session, tenant in (("t", "ada"), ("s", "bob")):
                with pytest.raises(Gone):
                    await at.service.heartbeat(session, tenant)

    within(SOON, scenario)


def test_a_heartbeat_does_not_wait_for_a_busy_disk_and_is_written_in_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path, times=Times(session=1.0)) as at:
            await at.begin()
            await at.service.heartbeat("s", "ada")
            release = threading.Event()
            busy = asyncio.create_task(at.store.database.write(lambda connection: release.wait(SOON)))
            try:
                before = time.time()
                await at.service.heartbeat("s", "ada")
                with pytest.raises(TimeoutError):  # another tenant's is asked for in the table, which is busy
                    await asyncio.wait_for(at.service.heartbeat("s", "bob"), 0.1)
                assert not busy.done()
            finally:
                release.set()
            await busy
            await until(lambda: _heard(at, before))

    within(SOON, scenario)


async def _heard(at: AppState, since: float) -> bool:
    return (await at.store.sessions.get("ada", "s")).last_heartbeat >= since


def test_a_session_that_was_heard_of_and_is_finished_is_gone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as at:
            await at.begin()
            await at.service.heartbeat("s", "ada")
            await at.store.sessions.end("ada", "s", "finished", time.time())
            await at.service.finish_session("s")
            with pytest.raises(Gone):
                await at.service.heartbeat("s", "ada")

    within(SOON, scenario)


@pytest.mark.full
def test_no_session_expires_while_its_operation_runs(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path, times=Times(session=0.5)) as at:
            await at.begin()
            at.plan.seconds = 1.5
            assert (await at.do("forward_backward")).status == "done"
            assert not at.plan.detached
            at.plan.seconds = 0.0
            await until(lambda: _is(at, "detached"))

    within(SOON, scenario)


def test_a_finished_session_leaves_no_model_in_the_engine_also_across_a_restart(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as at:
            await at.begin()
            await at.store.sessions.end("ada", "s", "finished", time.time())
        async with house(tmp_path, times=Times(session=0.1)) as at:
            await until(lambda: _is(at, "detached"))

    within(SOON, scenario)


def test_a_model_that_nobody_asks_for_is_not_kept_for_ever(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path, times=Times(session=0.1, kept_run=0.1)) as at:
            await at.begin()
            await until(lambda: _is(at, "gone"))
            told = await at.do("forward_backward")
            assert "it was not used" in str(told.error)

    within(SOON, scenario)


async def _is(at: AppState, status: str) -> bool:
    return await at.status() == status


def test_facts_say_why_no_work_would_be_done(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as at:
            await at.service.wait_ready()
            assert at.service.ready() == (
                True,
                {"engine": "up", "last_pass": "no failure", "store": "writable", "draining": False, "paths": []},
            )
            assert (await at.service.status())["models"] == {}
            await at.service.drain()
            good, facts = at.service.ready()
            assert (good, facts["draining"]) == (False, True)

    within(SOON, scenario)
