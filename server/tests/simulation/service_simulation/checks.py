"""What must hold when nothing is under way: books are empty, and the directory is what its rows say."""

import asyncio
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any

from service_simulation.reference import demand
from service_simulation.world import World

from twinkle_server.store.inspection import DATABASE

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
        len(service.outcomes._queue), len(dispatcher._senders), len(dispatcher._loading), len(dispatcher._burials),
    ]  # fmt: skip


def check_directory(world: World, clients: "list[Client]") -> None:
    """Compare the rows of the database with what clients know, and the files with the rows."""
    with closing(sqlite3.connect(world.data / DATABASE)) as raw:
        raw.row_factory = sqlite3.Row
        demand(raw.execute("PRAGMA integrity_check").fetchone()[0] == "ok", "the database is damaged")
        demand(not raw.execute("PRAGMA foreign_key_check").fetchall(), "rows name others that are not there")
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
