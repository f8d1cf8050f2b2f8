"""The bound of a request's head: its bytes, its headers, and the seconds in which a connection sends it."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from twinkle_server.errors import ServiceError, refuse
from twinkle_server.ids import new_id

_HEAD_BYTES = 64 * 2**10
_HEAD_SECONDS = 15.0
_DROPPED_BYTES = 2**30


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with a deadline and a bound for the head, and one for what comes after a refusal."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._head_bytes = 0
        self._dropped = 0
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a head."""
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes, and end the connection if its head does not end."""
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > _HEAD_BYTES:
                self.transport.close()

    def on_message_begin(self) -> None:
        """Begin to wait for a head."""
        super().on_message_begin()
        self._expect_head()

    def on_headers_complete(self) -> None:
        """Stop waiting."""
        self._cancel()
        self._in_head, self._head_bytes, self._dropped = False, 0, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take bytes of a body; those of a request that was answered already are dropped, and not for ever."""
        if self.cycle.response_complete:
            self._dropped += len(body)
            if self._dropped > _DROPPED_BYTES:
                self.transport.close()
        super().on_body(body)

    def _expect_head(self) -> None:
        self._cancel()
        self._in_head = True
        self._deadline = self.loop.call_later(_HEAD_SECONDS, self.transport.close)

    def _cancel(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


_HEADERS = 100
_HEADER_BYTES = 32 * 2**10
_PATH_BYTES = 8 * 2**10


class HeadTooLarge(ServiceError):
    """The request's head is larger than the service takes."""

    status = 431


class RequestHeadMiddleware:
    """Puts `request_id` into the scope and the answer's `X-Request-Id`, and refuses heads without bound."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = scope["request_id"] = new_id()
        marked = (b"x-request-id", name.encode())

        async def named(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), marked]}
            await send(message)

        if problem := _problem(scope):
            await refuse(named, HeadTooLarge(problem))
            return
        await self._app(scope, receive, named)


def _problem(scope: Any) -> str:
    headers = scope["headers"]
    if len(headers) > _HEADERS:
        return f"the request has {len(headers)} headers; {_HEADERS} is the most"
    if (size := sum(len(name) + len(value) for name, value in headers)) > _HEADER_BYTES:
        return f"the request's headers have {size} bytes; {_HEADER_BYTES} is the most"
    if len(scope.get("raw_path") or b"") + len(scope.get("query_string", b"")) > _PATH_BYTES:
        return f"the request's path is longer than {_PATH_BYTES} bytes"
    return ""
