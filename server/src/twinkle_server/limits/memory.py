"""Memory of the bodies that are being read: a budget in bytes, and one large body at a time on the event loop."""

import asyncio
import threading
from collections import deque

from twinkle_server.errors import Busy


class Budget:
    """A number of bytes that requests share; threads may ask.

    Args:
        size: bytes in all.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        self._lock = threading.Lock()

    def take(self, count: int) -> None:
        """Take bytes.

        Raises:
            Busy: there are not so many left.
        """
        with self._lock:
            if self.used + count > self.size:
                raise Busy(f"request memory is full ({self.used} of {self.size} bytes in use); retry later")
            self.used += count

    def give(self, count: int) -> None:
        """Give bytes back."""
        with self._lock:
            self.used -= count


class Share:
    """What one request has taken of a budget."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.taken = 0

    def take(self, count: int) -> None:
        """Take more.

        Raises:
            Busy: the budget has not so much left.
        """
        self._budget.take(count)
        self.taken += count

    def give(self, count: int) -> None:
        """Give some back."""
        self._budget.give(count)
        self.taken -= count

    def close(self) -> None:
        """Give everything back."""
        self.give(self.taken)


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
