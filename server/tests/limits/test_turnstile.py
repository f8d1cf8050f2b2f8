"""A crowd of large bodies does not hold up the event loop."""

import asyncio

from twinkle_server.limits.body import Turnstile


def test_one_passes_in_each_turn_of_the_loop_in_the_order_of_arrival() -> None:
    async def scenario() -> list[tuple[int, int]]:
        turnstile, turn, passed = Turnstile(), 0, []

        async def work(name: int) -> None:
            for _ in range(2):
                await turnstile.through()
                passed.append((turn, name))

        crowd = [asyncio.create_task(work(name)) for name in range(4)]
        while not all(task.done() for task in crowd):
            await asyncio.sleep(0)
            turn += 1
            assert turn < 100
        return passed

    passed = asyncio.run(scenario())
    assert [name for _, name in passed] == [0, 0, 1, 2, 3, 1, 2, 3], "0 came again before the others came"
    turns = [turn for turn, _ in passed]
    assert len(set(turns)) == 8, "two passed in one turn"


def test_whoever_leaves_or_lingers_holds_up_nobody() -> None:
    async def scenario() -> None:
        turnstile = Turnstile()

        async def linger() -> None:
            await turnstile.through()
            await asyncio.Event().wait()

        lingering = [asyncio.create_task(linger()) for _ in range(3)]
        waiting = asyncio.create_task(turnstile.through())
        await asyncio.sleep(0)
        lingering[1].cancel()
        async with asyncio.timeout(10):
            await waiting
            await turnstile.through()
        for task in lingering:
            task.cancel()
        await asyncio.gather(*lingering, return_exceptions=True)

    asyncio.run(scenario())
