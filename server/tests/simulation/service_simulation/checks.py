"""What must hold when nothing is under way: books are empty, and the directory is what its rows say."""

import asyncio
import sqlite3
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING, Any

from service_simulation.reference import demand
from service_simulation.service import Life
from service_simulation.world import World

from twinkle_server.engine import messages
from twinkle_server.runtime.queues import State
from twinkle_server.runtime.service import Service
from twinkle_server.store.inspection import DATABASE
from twinkle_server.store.journal import LOST_DIGEST

if TYPE_CHECKING:
    from service_simulation.clients import Client


IDLE = 300.0
"""Seconds after which the service has done again whatever a crash made necessary."""


def snapshot_of(world: World, model: str) -> str | None:
    """Return the folder of a model's newest snapshot, of a service that is down."""
    with closing(sqlite3.connect(world.data / DATABASE)) as raw:
        row = raw.execute("SELECT snapshot_folder FROM models WHERE id = ?", (model,)).fetchone()
    return None if row is None else row[0]


async def check_idle(world: World) -> None:
    """Demand that the runtime soon has nothing left in its books."""
    ends = world.clock.now + IDLE
    while any(books := _books(world)):
        demand(world.clock.now < ends, f"the books are not empty: {books}")
        await asyncio.sleep(1.0)


def _books(world: World) -> list[int]:
    """Return what the runtime has in its books."""
    assert world.life is not None
    service = world.life.service
    if service is None or not world.life.answering:
        return [1]
    dispatcher = service.dispatcher
    return [
        len(service.futures), len(dispatcher.in_flight), dispatcher.restoring, dispatcher._window.used,
        len(service.unrecorded), sum(len(queue.order.ready) for queue in dispatcher.queues.values()),
        len(service.generations), len(service.outcomes._queue), len(dispatcher._senders), len(dispatcher._loading),
        len(dispatcher._burials),
    ]  # fmt: skip


def check_books(life: Life) -> None:
    """Compare the books of the runtime with each other, at any moment."""
    service, counted = life.service, life.counted
    if service is None or counted is None or not life.answering or not life.process.alive:
        return
    futures, dispatcher = service.futures, service.dispatcher
    here = [entry.operation for entry in futures._open.values()]
    demand(futures.waiting == Counter(each.tenant for each in here) and all(futures.waiting.values()), "who waits")
    streams = service.generations.of_tenants
    waits = {each.tenant: futures.waiting[each.tenant] + streams[each.tenant] for each in here[:2]}
    demand(all(service.queued(tenant) == count for tenant, count in waits.items()), "how many wait")
    running = Counter(each.tenant for each in service.generations._running.values())
    demand(streams == running and all(streams.values()), "which streams run")
    queues = dispatcher.queues
    flights = {number: flight for queue in queues.values() for number, flight in queue.in_flight.items()}
    demand(flights == dispatcher.in_flight, "what the engine has")
    first = [flight.operation for flight in flights.values() if not flight.replay]
    demand(all(each.request in futures._open for each in first), "an operation in flight has no open future")
    demand({queue for queue in queues.values() if queue.sending} == set(dispatcher._senders), "which queues send")
    room = sum(flight.size + 512 for flight in flights.values())
    demand(
        dispatcher._window.used >= room and (bool(dispatcher._senders) or dispatcher._window.used == room), "the window"
    )
    demand(dispatcher._window.used <= max(dispatcher._window_bytes, room) + 0, "the bound of the window")
    _check_states(service)
    for queue in queues.values():
        for operation in queue.order.ready:
            demand(
                operation.status == "pending" and operation.request in futures._open, f"nobody waits for {operation}"
            )
    sums = service.runtime_status.status()
    found = (sums["open_futures"], sums["polls"], sums["in_engine"], sums["replays"], sums["queues"], sums["draining"])
    wanted = (len(here), futures.polls, len(flights), counted.replays, len(queues), service.runtime_status.draining)
    demand(found == wanted, f"the status is {found}, not {wanted}")
    gauges = {name: read() for name, read in counted.gauges.items()}
    oldest = gauges.pop("queue_age_seconds")
    demand(gauges == {"open_futures": len(here), "polls": futures.polls, "in_engine": len(flights)}, f"{gauges}")
    demand(oldest >= 0.0 and bool(oldest == 0.0 or here), f"the oldest future is {oldest} s old")
    demand(all(each >= 0.0 for each in counted.seconds[-5:]), "the seconds that operations took")
    engine = life.engines[-1] if life.engines else None
    if engine is not None and dispatcher.child is engine and not engine.failed:
        demand(service.runtime_status.last_pass.trouble is None, "a new engine is in trouble")


def _check_states(service: Service) -> None:
    """Compare the reasons why futures wait with what is known of the runtime."""
    dispatcher, supervisor = service.dispatcher, service.supervisor
    for name, queue in [*dispatcher.queues.items(), ("nowhere", None)]:
        gap = queue.order.gap() if queue is not None and not queue.running else None
        age = asyncio.get_running_loop().time() - gap.since if gap is not None else 0.0
        others = len(dispatcher.in_flight) - (len(queue.in_flight) if queue is not None else 0)
        wanted = ("active", f"{others} other operations are in flight" if others else None)
        if service.runtime_status.draining:
            wanted = "paused_capacity", "the service is shutting down; this operation resumes after the restart"
        elif service.outcomes.trouble is not None:
            wanted = "paused_capacity", "the service's disk cannot be written at the moment"
        elif gap is not None and age >= 3.0:
            missing = f"number {gap.number} of this model has not arrived"
            wanted = "paused_capacity", f"{missing}; {gap.waiting} operations wait for {age:.0f} s"
        elif not supervisor.up:
            wanted = "paused_capacity", "the engine is starting"
        elif supervisor.silent is not None:
            seconds = f"no sign of life for {supervisor.silent:.0f} s"
            wanted = "paused_capacity", f"the engine is not responding: {seconds} (its process may be stopped)"
        elif queue is not None and queue.state is State.POSTPONED:
            wanted = "paused_capacity", f"this model will be restored as soon as possible: {queue.postponed}"
        demand(service.queue_state(name) == wanted, f"{service.queue_state(name)}, not {wanted}")
    good, facts = service.ready()
    store = service.runtime_status.lost or service.outcomes.trouble
    healthy = service._store.database.healthy
    engine_works = supervisor.up and supervisor.silent is None and supervisor.troubled is None
    wanted_good = engine_works and service.runtime_status.last_pass.trouble is None and store is None and healthy
    demand(good is (wanted_good and not service.runtime_status.draining), f"it is ready: {good}, {facts}")
    demand(facts["store"] == (store or ("writable" if healthy else "the last commit failed")), f"{facts}")
    demand(
        facts["last_pass"] == (supervisor.troubled or service.runtime_status.last_pass.trouble or "no failure"),
        f"{facts}",
    )


async def check_counts(world: World) -> None:
    """Compare what this life counted with what its engines said; nothing is under way."""
    life = world.life
    assert life is not None
    if life.service is None or life.counted is None:
        return
    counted, engines = life.counted, life.engines
    for kind in (messages.RESTORED, messages.SNAPSHOTTED, messages.DETACHED, messages.PASSED):
        said = sum(engine.sent[kind] for engine in engines)
        demand(counted.engine[kind] == said, f"{counted.engine[kind]} of {said} {kind}")
    demand(counted.sizes == sum(engine.sizes for engine in engines), "the bytes of snapshots")
    restarts = life.service.supervisor.restarts
    demand(restarts == len(engines) + life.refused - 1, f"{restarts} restarts, {len(engines)} engines, {life.refused}")
    demand(counted.deaths.total() == len(engines) - 1, f"{counted.deaths}, {len(engines)} engines")
    demand(
        counted.deaths["hung"] == life.hung and set(counted.deaths) <= {"hung", "died"},
        f"{counted.deaths}, {life.hung}",
    )
    queues, ends = life.service.dispatcher.queues, world.clock.now + 30.0
    while idle := [name for name, queue in queues.items() if queue.idle]:
        demand(world.clock.now < ends, f"idle queues are not forgotten: {idle}")
        await asyncio.sleep(1.0)
    demand(
        not any(queue.distrusts for queue in life.service.dispatcher.queues.values()), "a queue distrusts its engine"
    )


def check_endings(world: World, raw: sqlite3.Connection) -> None:
    """Compare the rows of operations with what the only life counted."""
    if world.kills or world.aged or world.planned.refuse:
        return
    rows: dict[tuple[str, str, str], tuple[int, int]] = {}
    query = "SELECT kind, status, category, tenant, tokens FROM operations WHERE status <> 'pending' AND digest <> ?"
    for kind, status, category, tenant, tokens in raw.execute(query, (LOST_DIGEST,)):
        key = kind, category if status == "failed" else status, tenant
        count, total = rows.get(key, (0, 0))
        rows[key] = count + 1, total + tokens
    found: dict[tuple[str, str, str], tuple[int, int]] = {}
    for counted in world.counted:
        for key, (count, total) in counted.endings.items():
            before = found.get(key, (0, 0))
            found[key] = before[0] + count, before[1] + total
    demand(found == rows, f"{found} ended, not {rows}")
    attempts = dict(raw.execute("SELECT id, attempts FROM operations WHERE attempts > 0").fetchall())
    demand(attempts.keys() <= world.blamed.keys(), f"{attempts} were under way when an engine died, not {world.blamed}")


def check_usage(world: World, raw: sqlite3.Connection) -> None:
    """Compare the usage of tenants with the operations that are done."""
    if world.kills or world.aged or world.planned.refuse:
        return  # a crash loses what was not written, and the rows of old operations are deleted
    names = "CASE kind WHEN 'sample' THEN 'sampling_sample' ELSE 'training' END"
    kinds = "('forward', 'forward_backward', 'native_pass', 'sample')"
    query = f"SELECT tenant, {names}, sum(tokens) FROM operations WHERE status = 'done' AND kind IN {kinds}"
    expected = {row[:2]: row[2] for row in map(tuple, raw.execute(f"{query} AND tokens > 0 GROUP BY 1, 2"))}
    rows = map(tuple, raw.execute("SELECT tenant, kind, sum(tokens) FROM usage WHERE tenant < 'x' GROUP BY 1, 2"))
    usage = {row[:2]: row[2] for row in rows if row[1] != "storage"}
    demand(usage == expected, f"the usage is {usage}, not {expected}")


def check_directory(world: World, clients: "list[Client]") -> None:
    """Compare the rows of the database with what clients know, and the files with the rows."""
    with closing(sqlite3.connect(world.data / DATABASE)) as raw:
        raw.row_factory = sqlite3.Row
        demand(raw.execute("PRAGMA integrity_check").fetchone()[0] == "ok", "the database is damaged")
        demand(not raw.execute("PRAGMA foreign_key_check").fetchall(), "rows name others that are not there")
        check_endings(world, raw)
        check_usage(world, raw)
        for client in clients:
            for trainer in client.models:
                rows = raw.execute("SELECT * FROM operations WHERE lane = ?", (trainer.id,))
                _check_rows({row["number"]: row for row in rows}, trainer, world.aged)


def _check_rows(rows: dict[int, Any], trainer: Any, aged: bool) -> None:
    events = trainer.history.events
    for number, event in events.items():
        row = rows.get(number)
        if row is None and aged:
            continue
        demand(row is not None, f"{trainer.id} number {number} is not in the log")
        told = (row["tenant"], row["request"], row["status"])
        demand(told == (trainer.client.tenant, event.request, event.ending), f"{trainer.id} number {number}: {told}")
