"""Answers of the store that are asked for with every request, kept for a moment."""

import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

V = TypeVar("V")
_MOST = 4096


class Recent(Generic[V]):
    """Remembers what was found, never that nothing was.

    Args:
        seconds: that an answer is taken for true.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._known: dict[tuple[str, str], tuple[float, V]] = {}

    async def get(self, key: tuple[str, str], find: Callable[[], Awaitable[V]]) -> V:
        """Return the value of a key.

        Args:
            key: the tenant, and the id of what is its own.
            find: asks the store.
        """
        known = self._known.get(key)
        if known is not None and known[0] > time.monotonic():
            return known[1]
        value = await find()
        self._known.pop(key, None)
        while len(self._known) >= _MOST:
            del self._known[next(iter(self._known))]
        self._known[key] = (time.monotonic() + self._seconds, value)
        return value

    def forget(self) -> None:
        """Ask the store again from now on."""
        self._known.clear()
