"""Lets large bodies through one piece at a time, so that the loop answers small requests in between."""

import asyncio
from collections import deque


class Turnstile:
    """Lets one through in each turn of the event loop; nobody who is slow behind it holds up those before it."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._turning = False

    async def through(self) -> None:
        """Wait for a turn of the loop that is nobody else's."""
        if not self._turning:
            self._next_turn()
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        await place

    def _next_turn(self) -> None:
        self._turning = True
        asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._turning = False
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                self._next_turn()
                return
