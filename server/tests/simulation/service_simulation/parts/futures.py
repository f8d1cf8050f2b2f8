"""Clients that wait for results."""

import asyncio
import random
from collections import Counter
from typing import Any
from unittest import mock

from service_simulation.parts.support import (
    operation,
)
from service_simulation.reference import demand
from service_simulation.virtual import Clock

from twinkle_server.errors import Busy, NotFound
from twinkle_server.operations import Future, Operation
from twinkle_server.runtime import futures as futures_module
from twinkle_server.runtime.futures import Futures


class _Journal:
    def __init__(self) -> None:
        self.reads: dict[int, float] = {}
        self.asked: list[tuple[str, str]] = []

    async def future(self, request: str, tenant: str) -> Future:
        self.asked.append((request, tenant))
        raise NotFound("it is not in the log")


async def wait_for_futures(clock: Clock, draw: random.Random) -> None:
    """Who waits gets the future when it is over, or what there is in time; so many may wait."""
    each, most = draw.choice([1, 3]), draw.choice([2, 4, 100])
    journal: Any = _Journal()
    bytes_kept = draw.choice([0, 3000, 10**6])
    with (
        mock.patch.object(futures_module, "_POLLS", most),
        mock.patch.object(futures_module, "_RECENT_BYTES", bytes_kept),
    ):
        futures = Futures(journal, each)
        opened: dict[str, tuple[Operation, float]] = {}
        waiters: list[tuple[Operation, float, asyncio.Task[Future]]] = []
        recent: list[tuple[Operation, Future]] = []
        for number in range(50):
            what = draw.choice(["open", "open", "wait", "wait", "wait", "end", "end", "sleep", "forget"])
            tenant = draw.choice(["ada", "bob"])
            if what == "open":
                new = operation(number, tenant, kind="sample")
                opened[new.request] = (new, clock.now)
                futures.open(new)
                futures.open(new)
            elif what == "wait" and opened:
                wanted, _ = opened[draw.choice(sorted(opened))]
                here = [one for one in waiters if not one[2].done()]
                mine = sum(one[0].tenant == wanted.tenant for one in here)
                seconds = draw.choice([0.0, 5.0])
                waiting = asyncio.create_task(futures.wait(wanted.request, wanted.tenant, seconds))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                if mine >= each or len(here) >= most:
                    demand(waiting.done() and isinstance(waiting.exception(), Busy), f"{mine} and {len(here)} wait")
                    demand(f"you have {mine}, the service has {len(here)}" in str(waiting.exception()), "who waits")
                elif seconds:
                    waiters.append((wanted, clock.now, waiting))
                else:
                    demand(waiting.done() and waiting.result().status == "pending", "nobody has time to wait")
            elif what == "end" and opened:
                request = draw.choice(sorted(opened))
                over, since = opened.pop(request)
                future = Future("sample", "done", "m", b"x" * draw.choice([1, 1500]))
                demand(futures.resolve(over, future) == clock.now - since, "the seconds that it took")
                demand(futures.resolve(over, future) == 0.0, "it is over twice")
                recent.append((over, future))
                await asyncio.sleep(0.001)
                for operation_, _, waiting in waiters:
                    if operation_ is over and not waiting.done():
                        demand(False, "a future is over, and somebody waits for it")
                demand(journal.reads.get(over.id, 0.0) <= clock.wall(), "when it was read")
            elif what == "sleep":
                await asyncio.sleep(draw.choice([0.5, 2.0]))
            elif what == "forget":
                futures.forget_recent()
                recent.clear()
            while sum(len(future.result or b"") + 1024 for _, future in recent) > bytes_kept:
                recent.pop(0)
            await _check_futures(futures, journal, opened, waiters, recent, clock)
        futures.close()
        await asyncio.sleep(0.001)
        demand(all(waiting.done() for _, _, waiting in waiters), "somebody waits at the end")
        for wanted, _ in opened.values():
            held = await asyncio.wait_for(futures.wait(wanted.request, wanted.tenant, 100.0), 1.0)
            demand(held.status == "pending", "a future that is not over")


async def _check_futures(futures: Futures, journal: Any, opened: Any, waiters: Any, recent: Any, clock: Clock) -> None:
    demand(len(futures) == len(opened), "the number of futures")
    demand(futures.waiting == Counter(each.tenant for each, _ in opened.values()), f"{futures.waiting} wait")
    demand(all(futures.waiting.values()), "tenants of whom nothing waits are kept")
    demand(futures.oldest() == (clock.now - min((since for _, since in opened.values()), default=clock.now)), "the age")
    for wanted, since, waiting in waiters:
        if waiting.done():
            future = waiting.result()
            demand(future.status == "done" or clock.now >= since + 5.0, "it did not wait long enough")
            demand((future.kind, future.queue_id) == ("sample", "m"), "what it is")
            demand(future.status != "done" or wanted.id in journal.reads, "it is not noted that it was read")
        else:
            demand(clock.now <= since + 5.0, "it waits too long")
    demand(futures.polls == sum(not waiting.done() for _, _, waiting in waiters), f"{futures.polls} wait for results")
    demand(not any(count == 0 for count in futures._polls_of.values()), "tenants who do not wait are kept")
    kept = {each.request for each, _ in recent}
    for known, future in recent:
        demand(await futures.wait(known.request, known.tenant, 0.0) is future, "what is over is at hand")
        demand(journal.reads[known.id] <= clock.wall(), "when it was read")
    for each, _ in [*opened.values(), *recent[-1:]]:
        demand((futures.find(each.request, each.tenant) is each) is (each.request in opened), "what is found")
        demand(futures.find(each.request, "eve") is None, "a foreign future is found")
        journal.asked.clear()
        try:
            await futures.wait(each.request, "eve", 0.0)
            demand(False, "a foreign future is read")
        except NotFound:
            demand(journal.asked == [(each.request, "eve")], "the log was not asked")
    demand(len(kept) == len(futures._recent), "what is kept at hand")
