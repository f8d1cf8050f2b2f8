"""How many bytes of bodies are in memory, over all requests."""

import threading

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
                raise Busy(f"{self.used} bytes of requests are in memory, of {self.size}; send this one again later")
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
