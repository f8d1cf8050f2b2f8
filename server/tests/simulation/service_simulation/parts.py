"""Parts of the runtime alone, driven at random on the simulated clock, each compared with a model of it."""

import asyncio
import itertools
import logging
import random
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any
from unittest import mock

from service_simulation.disk import shared_engine
from service_simulation.reference import demand
from service_simulation.virtual import Clock, Still, VirtualLoop, replaced_modules

from twinkle_server.errors import Busy, LeaseLost, NotFound
from twinkle_server.operations import Future, Operation, Outcome
from twinkle_server.runtime import arrivals as arrivals_module
from twinkle_server.runtime import futures as futures_module
from twinkle_server.runtime.arrivals import Arrivals
from twinkle_server.runtime.core import Janitor
from twinkle_server.runtime.dispatch import Window
from twinkle_server.runtime.futures import Futures
from twinkle_server.runtime.outcomes import Outcomes
from twinkle_server.runtime.queues import TRANSITIONS, Closed, Gap, InFlight, ModelQueue, SequenceOrder, State
from twinkle_server.runtime.sessions import Heartbeats
from twinkle_server.runtime.status import FORGOTTEN, LastPass
from twinkle_server.store import database

FRAME = 512


def operation(number: int, tenant: str = "ada", queue: str = "m", kind: Any = "optim_step", **fields: Any) -> Operation:
    """Return an operation."""
    return Operation(number + 1, f"r{queue}{number}", tenant, queue, number, kind, 1, **fields)


# The order of numbers


async def order_numbers(clock: Clock, draw: random.Random) -> None:
    """Items come in any order, and are released in the order of their numbers."""
    first = draw.choice([0, 5])
    order = SequenceOrder[int](first)
    early: dict[int, float] = {}
    used: set[int] = set()
    ready: list[int] = []
    following = first

    def advance() -> None:
        nonlocal following
        while following in used or following in early:
            if following in early:
                ready.append(following)
                del early[following]
            used.discard(following)
            following += 1

    for now in range(60):
        number = draw.randrange(following + 8)
        what = draw.choice(["arrive"] * 6 + ["use", "use", "pop", "pop", "give up", "far", "all"])
        if what == "arrive":
            fresh = number >= following and number not in early and number not in used
            demand(order.arrive(number, number, float(now)) is fresh, f"number {number} arrives")
            if fresh:
                early[number] = float(now)
        elif what == "use":
            order.use_up(number)
            if number >= following:
                early.pop(number, None)
                used.add(number)
        elif what == "pop" and ready:
            demand(order.ready.popleft() == ready.pop(0), "the order of what is ready")
        elif what == "give up":
            dropped = []
            if early:
                following = min(early)
                used = {each for each in used if each >= following}
                while following in early or following in used:
                    if early.pop(following, None) is not None:
                        dropped.append(following)
                    used.discard(following)
                    following += 1
            demand(order.give_up() == dropped, f"given up, not {dropped}")
        elif what == "far":
            far = sorted(each for each in early if each - following > 5)
            demand(order.drop_far(5) == far, f"dropped, not {far}")
            used.update(far)
            for each in far:
                del early[each]
        elif what == "all":
            demand(order.drop_all() == [*ready, *sorted(early)], "what was dropped")
            ready.clear()
            used.update(early)
            early.clear()
        advance()
        gap = Gap(following, min(early.values()), len(early)) if early else None
        demand((order.following, list(order.ready), order.gap()) == (following, ready, gap), f"after {what} {number}")
        hole = range(following, min(early, default=following))
        demand(
            (order.hole(), order.missing()) == (hole, [each for each in hole if each not in used]), "what is missing"
        )
        demand(all(order.holds(each) is (each in early) for each in range(following + 9)), "what is held")
        demand(order.idle is not bool(ready or early), "whether it is idle")


# The queue of a model


async def change_states(clock: Clock, draw: random.Random) -> None:
    """A model's queue goes through its states; what is illegal is refused."""
    closed = Closed("it is gone") if draw.random() < 0.1 else None
    first, ordered = draw.choice([-1, 3]), draw.random() < 0.9
    queue = ModelQueue("m", "ada", ordered, snapshot_number=first, closed=closed)
    demand((queue.newest_row, queue.snapshot_number, queue.order.following) == (0, first, first + 1), "its beginning")
    state = State.CLOSED if closed else State.DETACHED
    numbers = iter(range(first + 1, 1000))
    ready: list[Operation] = []
    flights: list[InFlight] = []
    sending = leaving = restoring = False
    deaths = attempts = 0
    distrusted: int | None = None
    answered: asyncio.Future[None] | None = None

    def legal(target: State) -> bool:
        return target in TRANSITIONS[state]

    for _ in range(80):
        what = draw.choice(
            ["arrive"] * 4
            + ["send"] * 4
            + ["land"] * 2
            + [
                "attach",
                "attached",
                "failed",
                "leave",
                "release",
                "detached",
                "postpone",
                "resume",
                "died",
                "restore",
                "restored",
                "sending",
                "withdraw",
                "distrust",
                "trust",
                "worked",
            ]
            + ["close"] * (draw.random() < 0.05)
        )
        if what == "arrive":
            new = operation(next(numbers))
            demand(queue.arrive(new, 1.0), "a new number")
            ready.append(new)
            if ordered:
                demand(not queue.arrive(new, 1.0), "a number twice")
        elif what == "send" and ready:
            replay = draw.random() < 0.2
            sent = operation(500 + len(flights) + draw.randrange(400)) if replay else ready.pop(0)
            if sent.id in queue.in_flight:
                continue
            flights.append(InFlight(sent, queue, 5, replay))
            queue.sent(flights[-1])
        elif what == "land" and flights:
            flight = flights.pop(draw.randrange(len(flights)))
            queue.landed(flight.operation.id)
            queue.landed(flight.operation.id)
        elif what == "attach" and ordered:
            if _moves(queue.start_attaching, legal(State.ATTACHING)):
                state = State.ATTACHING
        elif what == "attached":
            queue.attached()
            state = State.ATTACHED if state is State.ATTACHING else state
        elif what == "failed":
            queue.attaching_failed()
            state = State.DETACHED if state is State.ATTACHING else state
        elif what == "leave":
            queue.leave()
            leaving = ordered
        elif what == "release":
            engine = draw.random() < 0.8
            wanted = None
            if leaving and not (flights or ready or sending or state is State.DETACHING):
                leaving = False
                if state is State.ATTACHED and engine:
                    wanted, state = "detach", State.DETACHING
                elif state is not State.CLOSED:
                    wanted = "detached"
            demand(queue.release(engine) == wanted, f"released, not {wanted}")
        elif what == "detached":
            demand(queue.detached() is (state is State.DETACHING), "whether it was let go of")
            state = State.DETACHED if state is State.DETACHING else state
        elif what == "postpone":
            taken = queue.postpone("lacking")
            if state in (State.CLOSED, State.POSTPONED):
                demand(taken is None, "postponed twice")
            else:
                demand(taken == flights, "what was taken back")
                leaving, state, sending = leaving or state is State.DETACHING, State.POSTPONED, False
                flights.clear()
                demand(queue.next_attempt() == attempts, "the number of attempts")
                attempts += 1
        elif what == "worked":
            queue.worked()
            attempts = 0
        elif what == "resume":
            queue.resume()
            state = State.DETACHED if state is State.POSTPONED else state
        elif what == "died":
            blamed = {flights[0].operation.id} if flights and draw.random() < 0.5 else set()
            demand(queue.engine_died(blamed) == flights, "what the engine had")
            again = [flight.operation for flight in flights if not flight.replay]
            queue.put_back(again)
            ready[:0] = again
            leaving, sending = leaving or state is State.DETACHING, False
            state = state if state in (State.CLOSED, State.DETACHED) else State.DETACHED
            flights.clear()
            if restoring:
                deaths, restoring = deaths + (not blamed), False
        elif what == "restore":
            answered = asyncio.get_running_loop().create_future()
            queue.start_restoring(answered)
            restoring = True
        elif what == "restored":
            queue.restored()
            demand(answered is None or not restoring or answered.done(), "nobody was told that it is restored")
            restoring, deaths = False, 0
            queue.restored()
        elif what == "sending":
            if sending:
                queue.stop_sending()
            else:
                queue.start_sending()
            sending = not sending
        elif what == "withdraw":
            stranger = operation(2000)
            demand(not queue.withdraw(stranger), "a stranger was withdrawn")
            if ready:
                gone = ready.pop(draw.randrange(len(ready)))
                demand(queue.withdraw(gone), "what waits cannot be withdrawn")
        elif what == "distrust":
            number = draw.randrange(20)
            queue.distrust(number)
            distrusted = number if distrusted is None else min(number, distrusted)
        elif what == "trust":
            await queue.trust()
            distrusted = None
        elif what == "close":
            reason = Closed("closed", "server")
            demand(queue.close(reason) == ready, "what waited when it was closed")
            ready.clear()
            state, closed = State.CLOSED, reason
        running = bool(flights or ready or sending or state is State.DETACHING)
        facts = {
            "state": state,
            "closed": closed if state is State.CLOSED else None,
            "sending": sending,
            "running": running,
            "postponed": "lacking" if state is State.POSTPONED else None,
            "restoring": restoring,
            "may_send": not sending and state in (State.DETACHED, State.ATTACHED),
            "must_attach": ordered and state is not State.ATTACHED,
            "restore_deaths": deaths,
            "idle": not running and state is not State.ATTACHED,
            "distrusts": distrusted is not None,
            "head": ready[0] if ready else None,
        }
        found = {name: getattr(queue, name) for name in facts}
        demand(found == facts, f"after {what}: {found}, not {facts}")
        demand(
            list(queue.in_flight.values()) == flights and list(queue.order.ready) == ready, f"its lists after {what}"
        )
        again = [each.operation.number for each in flights if not each.replay] + [each.number for each in ready]
        for number in (0, 5, 12, 30):
            agrees = (distrusted is None or number < distrusted) and all(number < each for each in again)
            demand(queue.agrees_with(number) is agrees, f"whether it agrees with {number} after {what}")
    late = operation(next(numbers) + 1)
    if ordered and state is not State.CLOSED:
        queue.arrive(late, 1.0)
        demand(
            not queue.running or bool(ready or flights or sending or state is State.DETACHING), "it waits for a number"
        )
        demand(
            not queue.idle and queue.withdraw(late) and not queue.order.holds(late.number), "an early one is withdrawn"
        )


def _moves(move: Callable[[], None], legal: bool) -> bool:
    try:
        move()
    except RuntimeError:
        demand(not legal, "a legal change of state is refused")
        return False
    demand(legal, "an illegal change of state is made")
    return True


# Room on the way to the engine


async def share_room(clock: Clock, draw: random.Random) -> None:
    """Tenants wait in turn for a bounded number of bytes."""
    limit = draw.choice([600, 2000])
    window = Window(limit)
    used, waiting = 0, OrderedDict[str, list[tuple[int, int]]]()
    tasks: dict[int, asyncio.Task[None]] = {}
    held: dict[int, int] = {}
    numbers = iter(range(1000))

    def fits(size: int) -> bool:
        return used == 0 or used + size + FRAME <= limit

    def grant() -> None:
        nonlocal used
        while waiting:
            tenant, sizes = next(iter(waiting.items()))
            if not fits(sizes[0][1]):
                return
            number, size = sizes.pop(0)
            waiting.pop(tenant)
            if sizes:
                waiting[tenant] = sizes
            used += size + FRAME
            held[number] = size

    for _ in range(60):
        what = draw.choice(["take", "take", "take", "try", "give", "give", "cancel", "cancel now"])
        size, tenant = draw.choice([0, 10, limit - FRAME, limit]), draw.choice("abc")
        if what == "try":
            good = not waiting and fits(size)
            demand(window.try_acquire(size) is good, f"room for {size} of {used}")
            if good:
                number = next(numbers)
                used += size + FRAME
                held[number] = size
        elif what == "take":
            number = next(numbers)
            tasks[number] = asyncio.create_task(window.acquire(tenant, size))
            if not waiting and fits(size):
                used += size + FRAME
                held[number] = size
            else:
                waiting.setdefault(tenant, []).append((number, size))
        elif what == "give" and held:
            size = held.pop(draw.choice(sorted(held)))
            used -= size + FRAME
            window.release(size)
            grant()
        elif what == "cancel" and waiting:
            owner = draw.choice(list(waiting))
            entry = draw.choice(waiting[owner])
            tasks[entry[0]].cancel()
            waiting[owner].remove(entry)
            if not waiting[owner]:
                del waiting[owner]
            await asyncio.sleep(0.1)
            grant()
        elif what == "cancel now" and held and waiting:  # what gets room and is cancelled at the same moment
            size = held.pop(draw.choice(sorted(held)))
            used -= size + FRAME
            before = set(held)
            window.release(size)
            grant()
            for number in sorted(set(held) - before):
                tasks[number].cancel()
                used -= held.pop(number) + FRAME
            await asyncio.sleep(0.1)
            grant()
        await asyncio.sleep(0.1)
        grant()
        demand(window.used == used, f"{window.used} bytes are taken, not {used} after {what}")
        done = {number for number, task in tasks.items() if task.done() and not task.cancelled()}
        demand(done >= held.keys() & tasks.keys(), f"who has room after {what}")
        demand(
            not any(tasks[entry[0]].done() for entries in waiting.values() for entry in entries), "who waits has room"
        )
    for task in tasks.values():
        task.cancel()
    await asyncio.sleep(0.1)


# Futures


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


# Arrivals


async def watch_arrivals(clock: Clock, draw: random.Random) -> None:
    """Until when a request may still come follows from those that came."""
    kept = draw.choice([2, 4096])
    with mock.patch.object(arrivals_module, "_KEPT", kept):
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
                    while len(times) > kept:
                        times.popitem(last=False)
            elif what == "sleep":
                await asyncio.sleep(draw.choice([0.5, 1.0, 3.0, 40.0]))
            elif what == "all" and draw.random() < 0.2:
                arrivals.expect_resends()
                everybody = clock.now
            for name in ("ada", "bob", "eve", "zoe"):
                mine = [since for owner, since, _, _ in running if owner == name]
                last = clock.now if mine and clock.now - min(mine) > 1.0 else slow.get(name, never)
                until = max(last + 10.0, again.get(name, never) + 35.0, everybody + 35.0)
                demand(arrivals.expected_until(name, 10.0) == until, f"until when requests of {name} may come")
            demand(len(arrivals._active) == len({owner for owner, _, _, _ in running}), "who is on the way")


# Turns of the engine


async def count_turns(clock: Clock, draw: random.Random) -> None:
    """What failed last and has not worked since is told for a while."""
    last = LastPass()
    shown = {"pass": "pass", "optim_step": "optimizer step", "sample": "sampling step"}
    turns: dict[str, set[bool]] = {}
    failed: dict[str, float] = {}
    for _ in range(60):
        kind: Any = draw.choice(["forward", "forward_backward", "optim_step", "sample", "save", "create", "load"])
        name = "pass" if kind.startswith("forward") else kind
        what = draw.choice(["ended"] * 3 + ["passed", "passed", "sleep", "anew"])
        if what == "ended":
            category: Any = draw.choice([None, "user", "server", "unknown"])
            last.ended(kind, category)
            if name in shown and category in (None, "server"):
                turns.setdefault(name, set()).add(category is None)
        elif what == "passed":
            last.passed(name)
            ended = turns.pop(name, set())
            if True in ended:
                failed.pop(name, None)
            elif ended:
                failed[name] = clock.now
        elif what == "sleep":
            await asyncio.sleep(draw.choice([1.0, 29.0, FORGOTTEN]))
        elif draw.random() < 0.2:
            last.reset()
            turns.clear()
            failed.clear()
        fresh = [
            f"the last {shown[each]} failed as a whole; the log says why"
            for each, since in failed.items()
            if clock.now - since < FORGOTTEN
        ]
        demand(last.trouble == (fresh[0] if fresh else None), f"{last.trouble}, not {fresh}")


# Heartbeats


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


# Chores


async def do_chores(clock: Clock, draw: random.Random) -> None:
    """Each chore is done again so many seconds after it was done, whether or not it failed."""
    janitor = Janitor()
    done: dict[str, list[tuple[float, float]]] = {}

    def chore(name: str, every: float, takes: float, fails: bool) -> None:
        runs = done.setdefault(name, [])

        async def work() -> None:
            begin = clock.now
            await asyncio.sleep(takes)
            runs.append((begin, clock.now))
            if fails:
                raise RuntimeError("a chore fails")

        janitor.add(name, every, work)

    began = clock.now
    for name, every in (("a", 2.0), ("b", 3.0), ("c", 7.0)):
        chore(name, every, draw.choice([0.0, 0.25]), draw.random() < 0.4)
    await asyncio.sleep(1.0)
    demand(not any(done.values()), "a chore is done before it is due")
    janitor.start()
    await asyncio.sleep(50.0)
    await janitor.stop()
    demand(janitor._task is not None and janitor._task.done(), "the chores are not ended")
    ended = clock.now
    for name, every in (("a", 2.0), ("b", 3.0), ("c", 7.0)):
        previous = began
        for begin, end in done[name]:
            demand(
                every - 1e-6 <= begin - previous <= every + 0.76, f"{name} began {begin - previous} s after the last"
            )
            previous = end
        demand(ended - previous <= every + 1.0, f"{name} is done no more")
    counts = {name: len(runs) for name, runs in done.items()}
    await asyncio.sleep(20.0)
    demand(counts == {name: len(runs) for name, runs in done.items()}, "a chore is done after the end")
    await Janitor().stop()


# The writer of outcomes


class _Writes:
    def __init__(self, draw: random.Random, clock: Clock) -> None:
        self.draw, self.clock = draw, clock
        self.written: list[int] = []
        self.bad: set[int] = set()
        self.full_until = 0.0
        self.lost = False
        self.tries: list[float] = []

    async def finish(self, outcomes: Any) -> list[Outcome]:
        self.tries.append(self.clock.now)
        await asyncio.sleep(self.draw.choice([0.0, 0.01]))
        if self.lost:
            raise LeaseLost("another process writes")
        if self.clock.now < self.full_until:
            raise self.draw.choice([Busy("the disk is full"), OSError(28, "No space left")])
        if any(outcome.operation in self.bad and outcome.result is not None for outcome in outcomes):
            raise ValueError("it cannot be written")
        self.written += [outcome.operation for outcome in outcomes]
        return list(outcomes)


async def write_outcomes(clock: Clock, draw: random.Random) -> None:
    """What the engine did is written in order, once, and told; a full disk delays it."""
    journal: Any = _Writes(draw, clock)
    told: list[tuple[int, str | None]] = []
    lost: list[str] = []
    unwritten: list[int] = []
    events: list[Any] = []

    def written(operation: Operation, outcome: Outcome) -> None:
        told.append((operation.id, outcome.error))
        events.append(operation.id)
        if draw.random() < 0.1:
            raise RuntimeError("who is told fails")

    outcomes = Outcomes(journal, written, lost.append, lambda operation: unwritten.append(operation.id))
    await outcomes.flush()
    outcomes.start()
    wanted: list[Any] = []
    bad: list[int] = []
    for number in range(60):
        what = draw.choice(["put"] * 6 + ["then", "flush", "full", "bad", "sleep"])
        if what in ("put", "bad"):
            each = operation(number, queue=draw.choice(["m", "n"]))
            if what == "bad":
                journal.bad.add(each.id)
                bad.append(each.id)
            outcomes.put(each, Outcome(each.id, b"result"))
            wanted.append(each.id)
        elif what == "then":

            def job(number: int = number) -> Any:
                async def run() -> None:
                    events.append(f"job {number}")

                return run()

            outcomes.then(job)
            wanted.append(f"job {number}")
        elif what == "flush":
            await outcomes.flush()
            demand(events == wanted, f"after a flush: {events}, not {wanted}")
            demand(outcomes.trouble is None, f"trouble: {outcomes.trouble}")
        elif what == "full":
            await outcomes.flush()
            begin, journal.full_until, journal.tries = clock.now, clock.now + 20.0, []
            each = operation(number)
            outcomes.put(each, Outcome(each.id, b"result"))
            wanted.append(each.id)
            await asyncio.sleep(1.0)
            demand(
                (outcomes.trouble is not None and "disk" in outcomes.trouble) or "space" in str(outcomes.trouble),
                f"trouble: {outcomes.trouble}",
            )
            demand(each.id not in events, "it is told before it is written")
            await asyncio.sleep(25.0)
            demand(events == wanted and outcomes.trouble is None, "it is not written when the disk takes it")
            pauses = [round(after - before, 1) for before, after in zip(journal.tries, journal.tries[1:], strict=False)]
            demand(
                pauses[-1] >= 5.0 and all(b <= 2 * a + 0.2 and b <= 5.1 for a, b in itertools.pairwise(pauses)),
                f"it was tried after {pauses} s from {begin}",
            )
            demand(pauses == sorted(pauses) and pauses[0] < 0.2, f"it was tried after {pauses} s")
        elif what == "sleep":
            await asyncio.sleep(0.1)
    await outcomes.flush()
    demand(events == wanted, f"{events}, not {wanted}")
    demand(sorted(journal.written) == sorted(each for each in wanted if isinstance(each, int)), "what was written")
    demand(unwritten == bad, f"{unwritten} cannot be written, not {bad}")
    demand(
        dict(told)
        == {
            each: "the result could not be written" if each in bad else None for each in wanted if isinstance(each, int)
        },
        "what was told",
    )
    await _withdraw(outcomes, journal, clock, events)
    if draw.random() < 0.5:
        journal.lost = True
        outcomes.put(operation(900), Outcome(901, b"result"))
        await outcomes.flush()
        demand(lost == ["another process writes"] and 901 not in events, f"the lease is lost: {lost}")
        demand(outcomes.trouble == "another process writes", "why nothing is written")
        await asyncio.wait_for(outcomes.flush(), 1.0)
    else:
        journal.full_until = clock.now + 1000.0
        outcomes.put(operation(900), Outcome(901, b"result"))
        begin = clock.now
        await outcomes.stop(3.0)
        demand(clock.now - begin < 3.1 and 901 not in events, "how long it tries at the end")
    await outcomes.stop(1.0)
    await Outcomes(journal, written, lost.append).stop(1.0)


async def _withdraw(outcomes: Outcomes, journal: Any, clock: Clock, events: list[Any]) -> None:
    """Take back results of one queue that are not written; failures, and those of others, stay."""
    journal.full_until = clock.now + 10.0
    rows = [operation(800 + number, queue="mn"[number % 2]) for number in range(6)]
    for row in rows:
        outcomes.put(row, Outcome(row.id, None, "failed") if row.number == 804 else Outcome(row.id, b"result"))
        await asyncio.sleep(0.2)
    demand(outcomes.withdraw("m") == [rows[2]], "what is taken back")
    await asyncio.sleep(30.0)
    demand(events[-5:] == [rows[each].id for each in (0, 1, 3, 4, 5)], f"what was taken back is written: {events[-6:]}")
    del events[-5:]
    journal.bad = {rows[0].id}
    journal.full_until = clock.now + 1.0
    for row in rows:
        outcomes.put(row, Outcome(row.id, b"result"))
    await asyncio.sleep(0.0)
    await asyncio.sleep(0.0)
    while not outcomes._batch:  # they are written one by one
        await asyncio.sleep(0.01)
        demand(clock.now < journal.full_until + 10.0, "they are never written one by one")
    left = [row for row in rows if any(row is entry[0] for entry in outcomes._batch)]
    demand(outcomes.withdraw("m") == [row for row in left if row.queue_id == "m"], "what is taken back from a batch")
    await outcomes.flush()


Part = Callable[[Clock, random.Random], Awaitable[None]]
PARTS: tuple[Part, ...] = (
    order_numbers,
    change_states,
    share_room,
    wait_for_futures,
    watch_arrivals,
    count_turns,
    hear_sessions,
    do_chores,
    write_outcomes,
)
AT_ONCE = 2
"""Parts of which a simulation drives each."""


def all_parts() -> list[Part]:
    """Return the parts of this module and of the others."""
    from service_simulation import parts_effects, parts_engine, parts_files, parts_store

    return [*PARTS, parts_effects.change_records, parts_engine.supervise, *parts_store.PARTS, *parts_files.PARTS]


def drive_parts(seed: int) -> None:
    """Drive some parts, each in a loop of its own.

    Raises:
        Violation: one broke a promise.
    """
    for part in parts_of(seed):
        drive(part, seed)


def parts_of(seed: int) -> list[Part]:
    """Return the parts that the simulation of a seed drives."""
    return random.Random(f"parts {seed}").sample(all_parts(), AT_ONCE)


def drive(part: Part, seed: int) -> None:
    """Drive one part."""
    clock = Clock()
    loop = VirtualLoop(clock, Still(seed))
    loop.set_exception_handler(lambda loop, context: None)
    logger = logging.getLogger("twinkle_server")
    level, propagate = logger.level, logger.propagate
    logger.setLevel(logging.CRITICAL + 1)
    logger.propagate = False
    try:
        with (
            replaced_modules(clock, random.Random(f"ids {seed}")),
            mock.patch.object(database, "engine", shared_engine),
        ):
            try:
                loop.run_until_complete(part(clock, random.Random(f"{part.__name__} {seed}")))
            finally:
                while left := asyncio.all_tasks(loop):
                    for task in left:
                        task.cancel()
                    loop.run_until_complete(asyncio.wait(left, timeout=1.0))
    finally:
        logger.setLevel(level)
        logger.propagate = propagate
        loop.close()
