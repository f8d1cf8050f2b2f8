"""The limit on bytes on the way to the engine."""

import asyncio
import random
from collections import OrderedDict

from service_simulation.parts.support import (
    FRAME,
)
from service_simulation.reference import demand
from service_simulation.virtual import Clock

from twinkle_server.runtime.dispatch import Window


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
