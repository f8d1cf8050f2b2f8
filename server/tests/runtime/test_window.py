"""Tenants take turns for room on the way to the engine."""

import asyncio

from server_runtime import SOON, within

from twinkle_server.runtime.dispatch import Window


def test_tenants_take_turns_whatever_the_number_of_their_requests() -> None:
    async def scenario() -> list[str]:
        window, order = Window(1000), []

        async def take(tenant: str) -> None:
            await window.acquire(tenant, 400)
            order.append(tenant)

        await window.acquire("first", 400)
        tasks = [asyncio.create_task(take(tenant)) for tenant in ("a", "a", "a", "a", "b", "b")]
        for _ in tasks:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            window.release(400)
        await asyncio.gather(*tasks)
        return order

    assert within(SOON, scenario) == ["a", "b", "a", "b", "a", "a"]


def test_what_is_larger_than_the_window_goes_alone() -> None:
    async def scenario() -> None:
        window = Window(1000)
        await window.acquire("a", 5000)
        assert not window.try_acquire(1)
        window.release(5000)
        assert window.used == 0
        assert window.try_acquire(1)

    within(SOON, scenario)


def test_who_stops_waiting_keeps_no_room() -> None:
    async def scenario() -> None:
        window = Window(1000)
        await window.acquire("a", 400)
        waiting = [asyncio.create_task(window.acquire(tenant, 400)) for tenant in ("b", "c")]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.wait([waiting[0]])
        window.release(400)
        await waiting[1]
        waiting.append(asyncio.create_task(window.acquire("d", 400)))
        await asyncio.sleep(0)
        window.release(400)
        waiting[2].cancel()
        await asyncio.wait([waiting[2]])
        assert window.used == 0

    within(SOON, scenario)
