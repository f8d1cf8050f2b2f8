"""Which requests are on their way, or may come again: a missing number is not lost while its request may come."""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from twinkle_server.tenancy.auth import Caller

_SLOW = 1.0  # seconds; a request that takes longer is a slow upload
_KEPT = 4096  # tenants


class Arrivals:
    """Watches requests that bring operations, from their headers to the start of their answer.

    Args:
        resend: seconds within which a client sends a request again that was answered with 408, 429 or 5xx, or that
            got no answer.
        clock: seconds, monotonic.
    """

    def __init__(self, resend: float, clock: Callable[[], float] = lambda: time.monotonic()) -> None:
        self._resend = resend
        self._clock = clock
        self._numbers = itertools.count()
        self._under_way: dict[str, dict[int, float]] = {}
        self._slow: dict[str, float] = {}
        self._again: dict[str, float] = {}
        self._everybody = float("-inf")

    def everybody_may_resend(self) -> None:
        """Note that the service was away, so that clients may be about to send again."""
        self._everybody = self._clock()

    @contextmanager
    def watch(self, tenant: str) -> Iterator[Callable[[int], None]]:
        """Watch one request of a tenant.

        Yields:
            A function that is told the status of the answer; a request that ends without one may come again.
        """
        number, begun = next(self._numbers), self._clock()
        self._under_way.setdefault(tenant, {})[number] = begun
        status = 0

        def answered(found: int) -> None:
            nonlocal status
            status = found

        try:
            yield answered
        finally:
            mine = self._under_way[tenant]
            del mine[number]
            if not mine:
                del self._under_way[tenant]
            now = self._clock()
            if now - begun > _SLOW:
                _note(self._slow, tenant, now)
            if status in (0, 408, 429) or status >= 500:
                _note(self._again, tenant, now)

    def expected_until(self, tenant: str, seconds: float) -> float:
        """Return until when a request of a tenant may still arrive, as far as the server can see; it may have passed.

        Args:
            tenant: whose.
            seconds: that a request may take on its way after another one of the tenant has arrived.
        """
        now = self._clock()
        begun = min(self._under_way.get(tenant, {}).values(), default=now)
        slow = now if now - begun > _SLOW else self._slow.get(tenant, float("-inf"))
        return max(
            slow + seconds, self._again.get(tenant, float("-inf")) + self._resend, self._everybody + self._resend
        )


def _note(times: dict[str, float], tenant: str, now: float) -> None:
    times.pop(tenant, None)
    times[tenant] = now
    while len(times) > _KEPT:
        times.pop(next(iter(times)))


OPERATIONS = frozenset(
    f"/api/v1/{name}"
    for name in (
        "forward",
        "forward_backward",
        "load_weights",
        "optim_step",
        "save_weights",
        "save_weights_external",
        "save_weights_for_sampler",
    )
)
"""Paths of the requests that have a number in the queue of a model."""


class ArrivalMiddleware:
    """Lets `Arrivals` watch requests that have a number; the tenant must be known already.

    Args:
        app: what comes behind it.
        arrivals: watches.
    """

    def __init__(self, app: Any, arrivals: Arrivals) -> None:
        self._app = app
        self._arrivals = arrivals

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one connection."""
        who = scope.get("caller")
        if scope["type"] != "http" or scope["path"] not in OPERATIONS or not isinstance(who, Caller):
            await self._app(scope, receive, send)
            return
        with self._arrivals.watch(who.tenant) as answered:

            async def told(message: Any) -> None:
                if message["type"] == "http.response.start":
                    answered(message["status"])
                await send(message)

            await self._app(scope, receive, told)
