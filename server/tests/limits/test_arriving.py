"""Requests that bring operations are watched from their headers to their answer; others are not."""

import asyncio
from typing import Any

import pytest

from twinkle_server.runtime.arrivals import OPERATIONS, ArrivalMiddleware, Arrivals
from twinkle_server.tenancy.auth import Caller

NEVER = float("-inf")


def expected(path: str, status: int, seconds: float = 0.0) -> float:
    """Return until when another request is expected, on a clock that begins at 100, after one that took so long."""
    now = [100.0]
    arrivals = Arrivals(35.0, lambda: now[0])

    async def app(scope: Any, receive: Any, send: Any) -> None:
        now[0] += seconds
        if seconds > 1 and path in OPERATIONS:
            assert arrivals.expected_until("ada", 10.0) == now[0] + 10
        if not status:
            raise ConnectionError
        await send({"type": "http.response.start", "status": status})

    async def send(message: Any) -> None:
        assert message["status"] == status

    scope = {"type": "http", "path": path, "caller": Caller("ada", "1")}
    try:
        asyncio.run(ArrivalMiddleware(app, arrivals)(scope, None, send))
    except ConnectionError:
        assert not status
    return arrivals.expected_until("ada", 10.0)


@pytest.mark.parametrize("path", sorted(OPERATIONS))
def test_operations_are_watched(path: str) -> None:
    assert expected(path, 200) == NEVER
    assert expected(path, 200, seconds=5.0) == 115.0
    assert expected(path, 503) == 135.0
    assert expected(path, 0) == 135.0


@pytest.mark.parametrize("path", ["/api/v1/asample", "/api/v1/retrieve_future", "/readyz"])
def test_others_are_not(path: str) -> None:
    assert expected(path, 503, seconds=5.0) == NEVER
