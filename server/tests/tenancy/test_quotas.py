"""Quotas slow down or refuse in words what comes next, and never touch what was accepted."""

import asyncio
from functools import partial
from pathlib import Path

import pytest

from twinkle_server.errors import BadRequest, Busy, Forbidden
from twinkle_server.operations import Accepted, Submission
from twinkle_server.store.models import add as add_model
from twinkle_server.store.opening import Store, open_store
from twinkle_server.store.records import Checkpoint, Model, Session
from twinkle_server.tenancy.auth import CURRENT, Caller
from twinkle_server.tenancy.quotas import Limited, Meter, Quotas, check_quotas


class World:
    """What a meter is told."""

    def __init__(self) -> None:
        self.now, self.pending = 0.0, 0
        self.meter = Meter(lambda tenant: self.pending, lambda: self.now)

    def check(self, caller: Caller) -> None:
        """Raise what the meter says."""
        if verdict := self.meter.verdict(caller):
            raise verdict


def test_no_quotas_no_limits() -> None:
    world, free = World(), Caller("a", "k")
    world.pending = 10**12
    world.meter.charge(free, 10**12)
    world.check(free)


def test_a_rate_lets_bursts_pass_then_says_how_long_to_wait() -> None:
    world, caller = World(), Caller("a", "k", quotas={"tokens_per_second": 100})
    for _ in range(10):
        world.check(caller)
        world.meter.charge(caller, 100)
    world.check(caller)
    world.meter.charge(caller, 500)
    with pytest.raises(Busy, match="100 tokens per second") as caught:
        world.check(caller)
    assert caught.value.retry_after == pytest.approx(5.0)
    world.now += 4.9
    with pytest.raises(Busy):
        world.check(caller)
    world.now += 0.2
    world.check(caller)


def test_a_request_larger_than_the_burst_passes_and_leaves_a_debt() -> None:
    world, caller = World(), Caller("a", "k", quotas={"tokens_per_second": 10})
    world.check(caller)
    world.meter.charge(caller, 10_000)
    with pytest.raises(Busy) as caught:
        world.check(caller)
    assert caught.value.retry_after == pytest.approx(990.0)


def test_over_a_long_time_the_rate_is_what_was_set() -> None:
    world, caller, used = World(), Caller("a", "k", quotas={"tokens_per_second": 50}), 0
    for _ in range(5000):
        world.now += 0.1
        try:
            world.check(caller)
        except Busy:
            continue
        world.meter.charge(caller, 37)
        used += 37
    assert used / 500 == pytest.approx(50, rel=0.03)


def test_keys_do_not_share_rates() -> None:
    world = World()
    first, second = (Caller("a", key, quotas={"tokens_per_second": 1}) for key in ("1", "2"))
    world.meter.charge(first, 1000)
    world.check(second)
    with pytest.raises(Busy):
        world.check(first)


def test_operations_at_once_are_bounded() -> None:
    world, caller = World(), Caller("a", "k", quotas={"operations": 4})
    world.pending = 3
    world.check(caller)
    world.pending = 4
    with pytest.raises(Busy, match="you have 4 "):
        world.check(caller)


def model(number: int, status: str = "live", tenant: str = "a") -> Model:
    session = "s" if tenant == "a" else "t"
    return Model(f"{session}:train:{number}", tenant, session, number, "base", 8, 0.0, 0.0, status=status)


def checkpoint(number: int, **fields: object) -> Checkpoint:
    made = {
        "tenant": "a",
        "run": "s:train:0",
        "kind": "weights",
        "name": str(number),
        "folder": f"checkpoints/{number}",
    }
    return Checkpoint(**{**made, "size": 60, "digest": "", "base": "b", "rank": 8, "created": 1.0, **fields})


def test_adapters_and_bytes_are_bounded_by_what_is_there(tmp_path: Path) -> None:
    caller = Caller("a", "k", quotas={"adapters": 2, "bytes": 100})

    async def story(store: Store) -> None:
        async def check(kind: str) -> None:
            await store.database.read(lambda connection: check_quotas(connection, caller, kind, 50.0))

        for session, tenant in (("s", "a"), ("t", "b")):
            await store.sessions.create(Session(session, tenant, 0.0, 0.0))
        for each in (model(0), model(1, "gone"), model(2, "detached"), model(3, tenant="b")):
            await store.database.write(lambda connection, each=each: add_model(connection, each))
        for each in (checkpoint(0), checkpoint(1, expires=40.0), checkpoint(2, tenant="b", run="x")):
            await store.checkpoints.create(each)
        await check("create")
        await check("save")
        await store.database.write(lambda connection: add_model(connection, model(4, "creating")))
        await store.checkpoints.create(checkpoint(3))
        with pytest.raises(Forbidden, match=r"2 adapters .limit of this key: 2.; finish a session"):
            await check("create")
        with pytest.raises(Forbidden, match=r"120 bytes of checkpoints.*delete some"):
            await check("save")
        for kind in ("load", "sample", "optim_step"):
            await check(kind)
        for quotas, adapters in (({}, 2), ({"bytes": 1000}, 1)):
            create = partial(check_quotas, caller=Caller("a", "k", quotas=quotas), kind="create", now=50.0)
            with pytest.raises(Forbidden, match=rf"2 adapters .limit of this service: {adapters}."):
                await store.database.read(partial(create, adapters=adapters))
            await store.database.read(partial(create, adapters=3))

    store = open_store(tmp_path / "data")
    try:
        asyncio.run(story(store))
    finally:
        store.close()


@pytest.mark.parametrize("said", [{"speed": 1}, {"bytes": -1}, {"bytes": "1"}, {"keep": True}, {"keep": float("nan")}])
def test_quotas_that_make_no_sense_are_refused(said: dict) -> None:
    with pytest.raises(BadRequest):
        Quotas.read(said)


class Service:
    """Accepts everything once."""

    def __init__(self) -> None:
        self.seen: list[int | None] = []
        self.gaps: set[int | None] = set()

    async def submit(self, submission: Submission, in_transaction=None) -> Accepted:
        fresh = submission.number not in self.seen
        if fresh and in_transaction:
            in_transaction(None)
        self.seen.append(submission.number)
        return Accepted("r", fresh)

    def awaited(self, submission: Submission) -> bool:
        return submission.number in self.gaps

    submit_next = wait = cancel = queue_state = finish_session = heartbeat = submit


def test_a_number_for_which_others_wait_is_let_in_beyond_the_limit() -> None:
    async def story() -> None:
        world, service = World(), Service()
        limited = Limited(service, world.meter)
        CURRENT.set(Caller("a", "k", quotas={"tokens_per_second": 10}))
        await limited.submit(Submission("a", "m", "forward_backward", b"", 2, tokens=1000))
        with pytest.raises(Busy):
            await limited.submit(Submission("a", "m", "forward_backward", b"", 1, tokens=1))
        service.gaps.add(1)
        await limited.submit(Submission("a", "m", "forward_backward", b"", 1, tokens=1))

    asyncio.run(story())


def test_the_service_limits_the_adapters_of_keys_without_a_quota(tmp_path: Path) -> None:
    async def story(store: Store) -> None:
        await store.sessions.create(Session("s", "a", 0.0, 0.0))

        class Writing(Service):
            async def submit(self, submission: Submission, in_transaction=None) -> Accepted:
                await store.database.read(lambda connection: in_transaction and in_transaction(connection))
                await store.database.write(lambda connection: add_model(connection, model(submission.number)))
                return Accepted("r", True)

        limited = Limited(Writing(), World().meter, adapters=2)
        CURRENT.set(Caller("a", "k"))
        for number in (1, 2):
            await limited.submit(Submission("a", "m", "create", b"", number))
        with pytest.raises(Forbidden, match=r"2 adapters .limit of this service: 2."):
            await limited.submit(Submission("a", "m", "create", b"", 3))

    store = open_store(tmp_path / "data")
    try:
        asyncio.run(story(store))
    finally:
        store.close()


def test_only_what_is_new_is_charged_or_refused() -> None:
    async def story() -> list[int | None]:
        world, service = World(), Service()
        limited = Limited(service, world.meter)
        CURRENT.set(Caller("a", "k", quotas={"tokens_per_second": 10}))
        done: list[int] = []
        await limited.submit(Submission("a", "m", "forward_backward", b"", 1, tokens=100))
        await limited.submit(Submission("a", "m", "forward_backward", b"", 1, tokens=100))
        await limited.submit(Submission("a", "m", "forward_backward", b"", 2, tokens=1), lambda _: done.append(2))
        assert done == [2]
        with pytest.raises(Busy):
            await limited.submit(Submission("a", "m", "forward_backward", b"", 3, tokens=1), lambda _: done.append(3))
        assert done == [2]
        await limited.submit(Submission("a", "m", "forward_backward", b"", 2, tokens=1))
        await limited.submit(Submission("a", "m", "forward_backward", b"", 3, refusal="its number must be used up"))
        await limited.submit(Submission("a", "m", "unload", b"", 4))
        return service.seen

    assert asyncio.run(story()) == [1, 1, 2, 2, 3, 4]


def test_requests_that_cannot_be_done_are_bounded_like_others() -> None:
    def bad(number: int, tenant: str = "a") -> Submission:
        return Submission(tenant, "m", "optim_step", b"", number, refusal="eps is negative")

    async def story() -> None:
        world, service = World(), Service()
        limited = Limited(service, world.meter)
        for number in range(4096):
            await limited.submit(bad(number))
        with pytest.raises(Busy, match="too many invalid requests") as caught:
            await limited.submit(bad(4096))
        service.gaps.add(4096)
        await limited.submit(bad(4096))
        await limited.submit(bad(5000, "b"))
        await limited.submit(Submission("a", "m", "optim_step", b"", 4097))
        world.now += caught.value.retry_after + 1.0
        await limited.submit(bad(4098))
        assert len(service.seen) == 4096 + 4

    asyncio.run(story())


def test_a_save_without_room_uses_up_its_number(monkeypatch) -> None:
    def full(connection: object, caller: Caller, kind: str, now: float, adapters: int | None) -> None:
        raise Forbidden("no room")

    monkeypatch.setattr("twinkle_server.tenancy.quotas.check_quotas", full)
    refused: list[str | None] = []

    class Noting(Service):
        async def submit(self, submission: Submission, in_transaction=None) -> Accepted:
            accepted = await super().submit(submission, in_transaction)
            refused.append(submission.refusal)
            return accepted

    async def story() -> None:
        limited = Limited(Noting(), World().meter)
        CURRENT.set(Caller("a", "k", quotas={"bytes": 10}))
        assert (await limited.submit(Submission("a", "m", "save", b"", 1))).request == "r"
        with pytest.raises(Forbidden):
            await limited.submit(Submission("a", "m", "create", b"", 0))

    asyncio.run(story())
    assert refused == ["no room"]
