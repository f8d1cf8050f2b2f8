"""Every request gets a name, and heads are bounded."""

import asyncio
from typing import Any

import pytest

from twinkle_server.limits.head import RequestHeadMiddleware


async def fine(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
    await send({"type": "http.response.body", "body": b""})


def ask(headers: list[tuple[bytes, bytes]], path: bytes = b"/") -> tuple[int, dict[bytes, bytes], dict[str, Any]]:
    """Ask once; return status, headers and the scope."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "headers": headers, "raw_path": path, "query_string": b""}
    asyncio.run(RequestHeadMiddleware(fine)(scope, None, send))
    return sent[0]["status"], dict(sent[0]["headers"]), scope


def test_requests_have_names_of_their_own_that_the_answer_tells() -> None:
    _, first, scope = ask([(b"x-request-id", b"chosen by the client")])
    _, second, _ = ask([])
    assert first[b"x-request-id"].decode() == scope["request_id"] != "chosen by the client"
    assert first[b"x-request-id"] != second[b"x-request-id"]
    assert first[b"a"] == b"b"


@pytest.mark.parametrize(
    ("headers", "path"),
    [([(b"a", b"b")] * 101, b"/"), ([(b"a", b"b" * 40_000)], b"/"), ([], b"/" + b"a" * 9000)],
)
def test_heads_without_bound_are_refused(headers: list[tuple[bytes, bytes]], path: bytes) -> None:
    status, said, _ = ask(headers, path)
    assert status == 431
    assert said[b"content-type"] == b"application/json"
