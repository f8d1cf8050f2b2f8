"""Bodies reach the application whole, decompressed and within bounds, or not at all."""

import asyncio
from typing import Any

import orjson
import pytest
import zstandard

from twinkle_server.limits import body as module
from twinkle_server.limits.body import BodyLimitMiddleware
from twinkle_server.settings import Limits

LIMITS = Limits(body_bytes=1000, decompressed_bytes=5000, inflight_bytes=20_000)


class App:
    """Remembers what reached it."""

    def __init__(self) -> None:
        self.body: bytes | None = None
        self.headers: dict[bytes, bytes] = {}
        self.hold: asyncio.Event | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        self.body, self.headers = message["body"], dict(scope["headers"])
        assert not message["more_body"]
        if self.hold:
            await self.hold.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


async def ask(
    app: Any, pieces: list[bytes], headers: dict[str, str] | None = None, wait: float = 0.0, path: str = "/"
) -> tuple[int, Any]:
    """Send pieces of a body and return status and JSON."""
    left, sent = list(pieces), []

    async def receive() -> Any:
        if not left:
            return {"type": "http.disconnect"}
        await asyncio.sleep(wait)
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    async def send(message: Any) -> None:
        sent.append(message)

    made = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    await app({"type": "http", "path": path, "headers": made}, receive, send)
    if not sent:
        return 0, None
    body = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], orjson.loads(body) if body else None


def run(
    pieces: list[bytes], headers: dict[str, str] | None = None, limits: Limits = LIMITS, path: str = "/"
) -> tuple[int, Any, App, BodyLimitMiddleware]:
    """Ask once."""
    app = App()
    guarded = BodyLimitMiddleware(app, limits)
    status, said = asyncio.run(ask(guarded, pieces, headers, path=path))
    assert guarded.budget.used == 0, "what was taken is given back"
    return status, said, app, guarded


def test_pieces_arrive_as_one_body() -> None:
    status, _, app, _ = run([b"a", b"b" * 10, b"", b"c"])
    assert (status, app.body) == (200, b"a" + b"b" * 10 + b"c")


def test_a_body_that_says_that_it_is_too_large_is_refused_unread() -> None:
    status, said, app, _ = run([b"x"], {"content-length": "1001"})
    assert status == 413
    assert "1000 bytes" in said["detail"]
    assert app.body is None


def test_a_body_that_grows_too_large_is_refused_where_it_does() -> None:
    status, _, app, _ = run([b"x" * 400] * 3)
    assert status == 413
    assert app.body is None
    assert run([b"x" * 500] * 2)[0] == 200


def test_a_zstd_body_arrives_as_what_it_stands_for_without_saying_so() -> None:
    packed = zstandard.compress(b"row " * 1000)
    status, _, app, _ = run([packed[:7], packed[7:]], {"content-encoding": "ZSTD", "content-length": str(len(packed))})
    assert (status, app.body) == (200, b"row " * 1000)
    assert b"content-encoding" not in app.headers
    assert b"content-length" not in app.headers


def test_a_bomb_is_refused() -> None:
    status, said, app, _ = run([zstandard.compress(bytes(6000))], {"content-encoding": "zstd"})
    assert status == 413
    assert "decompressed" in said["detail"]
    assert app.body is None


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd, zstd"])
def test_other_encodings_are_refused_in_words(encoding: str) -> None:
    status, said, _, _ = run([b"x"], {"content-encoding": encoding})
    assert status == 400
    assert "zstd" in said["detail"]


def test_deep_json_is_refused_whether_or_not_it_is_compressed() -> None:
    deep = b"[" * 500
    assert run([deep], {"content-type": "application/json"})[0] == 400
    headers = {"content-type": "application/json; charset=utf-8", "content-encoding": "zstd"}
    assert run([zstandard.compress(deep)], headers)[0] == 400
    binary = {"content-type": "application/x-protobuf"}
    assert run([deep], binary)[0] == 400, "a path that takes JSON alone reads it whatever it is called"
    assert run([deep], binary, path="/api/v1/forward_backward")[0] == 200


def test_who_comes_when_memory_is_used_up_is_asked_to_come_again_and_is_served_then() -> None:
    limits = Limits(body_bytes=1000, inflight_bytes=1500)

    async def story() -> list[int]:
        app = App()
        app.hold = asyncio.Event()
        guarded = BodyLimitMiddleware(app, limits)
        first = asyncio.create_task(ask(guarded, [b"x" * 1000]))
        await asyncio.sleep(0.01)
        second = await ask(guarded, [b"y" * 600])
        small = asyncio.create_task(ask(guarded, [b"y" * 400]))
        await asyncio.sleep(0.01)
        app.hold.set()
        third = await ask(guarded, [b"y" * 600])
        return [second[0], (await first)[0], (await small)[0], third[0], guarded.budget.used]

    assert asyncio.run(story()) == [429, 200, 200, 200, 0]


def test_decompression_counts_against_memory_too() -> None:
    limits = Limits(body_bytes=1000, decompressed_bytes=10**6, inflight_bytes=1500)
    status, said, _, _ = run([zstandard.compress(bytes(5000))], {"content-encoding": "zstd"}, limits)
    assert status == 429
    assert "memory is full" in said["detail"]


def test_a_body_that_trickles_is_ended(monkeypatch) -> None:
    monkeypatch.setattr(module, "_GRACE", 0.05)
    app = App()
    status, said = asyncio.run(ask(BodyLimitMiddleware(app, LIMITS), [b"x"] * 50, wait=0.02))
    assert status == 408
    assert "too slow" in said["detail"]
    assert app.body is None


def test_a_client_that_leaves_is_answered_nothing() -> None:
    async def story() -> list[Any]:
        sent: list[Any] = []
        messages = [{"type": "http.request", "body": b"x", "more_body": True}, {"type": "http.disconnect"}]

        async def receive() -> Any:
            return messages.pop(0)

        async def send(message: Any) -> None:
            sent.append(message)

        guarded = BodyLimitMiddleware(App(), LIMITS)
        await guarded({"type": "http", "headers": []}, receive, send)
        assert guarded.budget.used == 0
        return sent

    assert asyncio.run(story()) == []


def test_what_was_taken_is_given_back_when_the_application_fails() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("inside")

    guarded = BodyLimitMiddleware(broken, LIMITS)
    with pytest.raises(RuntimeError):
        asyncio.run(ask(guarded, [b"x" * 100]))
    assert guarded.budget.used == 0
