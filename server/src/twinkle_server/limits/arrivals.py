"""ASGI middleware that notes which tenants are sending operations of models; see `runtime.arrivals`."""

from typing import Any

from twinkle_server.runtime.arrivals import Arrivals
from twinkle_server.tenancy.auth import Caller

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
"""Paths of the requests that have a number in the lane of a model."""


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
