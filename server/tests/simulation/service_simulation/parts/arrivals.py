"""Requests and heartbeats that arrive: until when others may come, and what the table of sessions learns."""

import asyncio
import random
from collections import OrderedDict
from typing import Any
from unittest import mock

from service_simulation.reference import demand
from service_simulation.virtual import Clock

from twinkle_server.errors import Busy, NotFound
from twinkle_server.runtime import arrivals as arrivals_module
from twinkle_server.runtime.arrivals import Arrivals
from twinkle_server.runtime.sessions import Heartbeats
from twinkle_server.tenancy.auth import Caller


async def watch_arrivals(clock: Clock, draw: random.Random) -> None:
    """Until when a request may still come follows from those that came."""
    most = draw.choice([2, 4096])
    with mock.patch.object(arrivals_module, "_KEPT", most):
        arrivals = Arrivals(35.0)
        never = float("-inf")
        slow: OrderedDict[str, float] = OrderedDict()
        again: OrderedDict[str, float] = OrderedDict()
        everybody = never
        running: list[tuple[str, float, Any, Any]] = []
        for _ in range(50):
            what = draw.choice(["begin", "begin", "end", "end", "sleep", "all"])
            tenant = draw.choice(["ada", "bob", "eve"])
            if what == "begin":
                manager = arrivals.watch(tenant)
                running.append((tenant, clock.now, manager, manager.__enter__()))
            elif what == "end" and running:
                owner, since, manager, answered = running.pop(draw.randrange(len(running)))
                status = draw.choice([None, 200, 404, 408, 409, 429, 430, 499, 500, 503])
                if status is not None:
                    answered(status)
                manager.__exit__(None, None, None)
                if clock.now - since > 1.0:
                    slow.pop(owner, None)
                    slow[owner] = clock.now
                if status in (None, 408, 429, 500, 503):
                    again.pop(owner, None)
                    again[owner] = clock.now
                for times in (slow, again):
                    while len(times) > most:
                        times.popitem(last=False)
            elif what == "sleep":
                await asyncio.sleep(draw.choice([0.5, 1.0, 3.0, 40.0]))
            elif what == "all" and draw.random() < 0.2:
                arrivals.expect_resends()
                everybody = clock.now
            for name in ("ada", "bob", "eve", "zoe"):
                starts = [since for owner, since, _, _ in running if owner == name]
                last = clock.now if starts and clock.now - min(starts) > 1.0 else slow.get(name, never)
                until = max(last + 10.0, again.get(name, never) + 35.0, everybody + 35.0)
                demand(arrivals.expected_until(name, 10.0) == until, f"until when requests of {name} may come")
            demand(len(arrivals._active) == len({owner for owner, _, _, _ in running}), "who is on the way")
    await _watch_requests(draw)


async def _watch_requests(draw: random.Random) -> None:
    """Only requests of a known caller that carry operations are watched, until their response starts."""
    arrivals = Arrivals(35.0)
    caller = Caller("ada", "user")
    status = draw.choice([200, 429])
    operation = sorted(arrivals_module.OPERATIONS)[draw.randrange(len(arrivals_module.OPERATIONS))]
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        sent.append(len(arrivals._active))
        await asyncio.sleep(2.0)
        await send({"type": "http.response.start", "status": status})
        await send({"type": "http.response.body"})

    async def receive() -> Any:
        raise AssertionError("the middleware reads no body")

    async def send(message: Any) -> None:
        sent.append(message["type"])

    middleware = arrivals_module.ArrivalMiddleware(app, arrivals)
    for scope, watched in (
        ({"type": "http", "path": operation, "caller": caller}, 1),
        ({"type": "http", "path": "/healthz", "caller": caller}, 0),
        ({"type": "http", "path": operation}, 0),
        ({"type": "lifespan", "caller": caller}, 0),
    ):
        sent.clear()
        await middleware(scope, receive, send)
        demand(sent == [watched, "http.response.start", "http.response.body"], f"{scope}: {sent}")
    until = arrivals.expected_until("ada", 10.0) - asyncio.get_running_loop().time()
    demand(until == {200: 10.0, 429: 35.0}[status] - 6.0, f"after {status}, requests are expected for {until} s more")


class _Sessions:
    def __init__(self) -> None:
        self.active: set[tuple[str, str]] = set()
        self.heard_at: dict[str, float] = {}
        self.fails = False
        self.asked = 0

    async def heartbeat(self, tenant: str, session: str, now: float) -> None:
        self.asked += 1
        await asyncio.sleep(0.01)
        if (tenant, session) not in self.active:
            raise NotFound("no such session")
        self.heard_at[session] = now

    async def heard(self, heard: Any) -> None:
        rows = list(heard)
        await asyncio.sleep(0.01)
        if self.fails:
            raise Busy("the disk is full")
        for tenant, session, at in rows:
            demand((tenant, session) in self.active or session == "gone", f"{session} is not {tenant}'s")
            self.heard_at[session] = max(at, self.heard_at.get(session, 0.0))


async def hear_sessions(clock: Clock, draw: random.Random) -> None:
    """The table learns in time when sessions were heard of, and is asked once for each."""
    table: Any = _Sessions()
    beats = Heartbeats(table)
    names = ["s1", "s2", "s3"]
    table.active = {("ada", name) for name in names}
    known: set[str] = set()
    heard: dict[str, float] = {}
    for _ in range(40):
        what, name = draw.choice(["hear"] * 4 + ["write", "fail", "forget", "foreign"]), draw.choice(names)
        await asyncio.sleep(1.0)
        if what == "hear":
            asked = table.asked
            await beats.hear("ada", name)
            demand(table.asked - asked == (name not in known), f"the table was asked for {name}")
            if name in known:
                heard[name] = clock.wall()
            known.add(name)
        elif what == "foreign":
            try:
                await beats.hear("bob", name)
                demand(False, "a foreign session is heard of")
            except NotFound:
                pass
        elif what == "forget":
            beats.forget(name)
            known.discard(name)
            heard.pop(name, None)
        elif what == "write":
            table.fails = False
            await beats.write()
            demand(all(table.heard_at.get(each, 0.0) >= at for each, at in heard.items()), "what was heard is lost")
            heard.clear()
        elif what == "fail":
            table.fails = True
            writing = asyncio.create_task(beats.write())
            await asyncio.sleep(0.001)
            if draw.random() < 0.5 and heard:
                gone = draw.choice(sorted(heard))
                beats.forget(gone)
                known.discard(gone)
                del heard[gone]
            if draw.random() < 0.5 and known:
                later = draw.choice(sorted(known))
                await beats.hear("ada", later)
                heard[later] = clock.wall()
            await asyncio.wait([writing])
        demand({each for each in names if beats.since_written(each)} == heard.keys(), f"what is unwritten after {what}")
        demand(beats._unwritten == heard, f"{beats._unwritten}, not {heard}")
    hearing = asyncio.create_task(beats.hear("ada", "s1"))
    beats.forget("s1")
    known.discard("s1")
    hearing2 = asyncio.create_task(beats.hear("ada", "s1"))
    await asyncio.sleep(0.001)
    beats.forget("s2")  # it may have been s1 that has ended: the table is asked again
    await asyncio.wait([hearing, hearing2])
    asked = table.asked
    await beats.hear("ada", "s1")
    demand(table.asked == asked + 1, "a session that ended meanwhile is taken for active")
