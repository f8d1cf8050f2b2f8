"""Connections that never say what they want end by themselves, and those that do are served as ever."""

import asyncio
import socket
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import uvicorn

from twinkle_server.limits import head as module
from twinkle_server.limits.body import BodyLimitMiddleware
from twinkle_server.limits.head import GuardedProtocol
from twinkle_server.settings import Limits

SECONDS = 20.0


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answer how many bytes came."""
    size = len((await receive())["body"])
    body = str(size).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A server with short patience."""
    monkeypatch.setattr(module, "_HEAD_SECONDS", 0.3)
    monkeypatch.setattr(module, "_DROPPED_BYTES", 10**6)
    guarded = BodyLimitMiddleware(app, Limits(body_bytes=1000))
    config = uvicorn.Config(guarded, http=GuardedProtocol, ws="none", lifespan="off", log_config=None)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    yield listener.getsockname()[1]
    server.should_exit = True
    thread.join(SECONDS)
    listener.close()


def read(connection: socket.socket) -> bytes:
    """Return what comes until the other side ends."""
    data = b""
    try:
        while piece := connection.recv(65536):
            data += piece
    except ConnectionResetError:
        pass
    return data


def flood(port: int, head: bytes, pieces: Iterable[bytes]) -> None:
    """Send pieces for as long as they are taken."""
    with socket.create_connection(("127.0.0.1", port), SECONDS) as connection:
        connection.sendall(head)
        for piece in pieces:
            connection.sendall(piece)


@pytest.mark.sample(2)
@pytest.mark.parametrize("start", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\nA: b\r\n"])
def test_a_head_that_does_not_end_ends_the_connection(port: int, start: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), SECONDS) as connection:
        connection.sendall(start)
        assert read(connection) == b""


def test_a_head_without_bound_ends_the_connection(port: int) -> None:
    lines = (b"X-%d: %s\r\n" % (number, b"y" * 1000) for number in range(10_000))
    with pytest.raises(ConnectionError):
        flood(port, b"GET / HTTP/1.1\r\n", lines)


def test_requests_after_each_other_on_one_connection_are_served(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), SECONDS) as connection:
        for size in (0, 5, 1000, 0, 7):
            connection.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (size, b"b" * size))
            answer = b""
            while not answer.endswith(b"\r\n\r\n" + str(size).encode()):
                answer += connection.recv(4096)
            assert answer.startswith(b"HTTP/1.1 200")


def test_what_is_too_large_is_answered_and_the_rest_of_it_dropped(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), SECONDS) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 500000\r\n\r\n" + b"b" * 500_000)
        answer = b""
        while b"detail" not in answer:
            answer += connection.recv(4096)
        assert answer.startswith(b"HTTP/1.1 413")
        connection.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nConnection: close\r\n\r\nabc")
        assert read(connection).endswith(b"\r\n\r\n3")


def test_a_body_without_end_ends_the_connection(port: int) -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with pytest.raises(ConnectionError):
        flood(port, head, (b"10000\r\n" + b"b" * 65536 + b"\r\n" for _ in range(1000)))
