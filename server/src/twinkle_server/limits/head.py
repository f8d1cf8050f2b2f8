"""Limits on request heads: size, number of headers, and the time in which they must arrive."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from twinkle_server.error_forms import error_path, is_chat, refuse
from twinkle_server.errors import ServiceError
from twinkle_server.ids import new_id

_HEAD_BYTES = 64 * 2**10
_HEAD_SECONDS = 15.0
_DROPPED_BYTES = 2**30


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with a deadline and a limit for the head, and a limit for dropped bodies."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._head_bytes = 0
        self._dropped = 0
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline for a head."""
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadline."""
        self._cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Process data, and close the connection if its head is too long."""
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > _HEAD_BYTES:
                self.transport.close()

    def on_message_begin(self) -> None:
        """Start the deadline for a head."""
        super().on_message_begin()
        self._expect_head()

    def on_headers_complete(self) -> None:
        """Cancel the deadline."""
        self._cancel()
        self._in_head, self._head_bytes, self._dropped = False, 0, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Process data of a body; after the response, it is dropped up to a limit."""
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
    """The head of the request exceeds a limit."""

    status = 431


class RequestHeadMiddleware:
    """Sets `request_id` in the scope and the header `X-Request-Id`, and refuses large heads.

    Responses below `/v1` also have the header `Request-Id`, which the SDK of Anthropic reads.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = scope["request_id"] = new_id()
        names = (b"x-request-id", b"request-id") if is_chat(scope.get("path", "")) else (b"x-request-id",)
        id_headers = [(name, request_id.encode()) for name in names]

        async def send_with_id(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *id_headers]}
            await send(message)

        if problem := _problem(scope):
            await refuse(send_with_id, HeadTooLarge(problem), error_path(scope))
            return
        await self._app(scope, receive, send_with_id)


def _problem(scope: Any) -> str:
    headers = scope["headers"]
    if len(headers) > _HEADERS:
        return f"a request must have at most {_HEADERS} headers, got {len(headers)}"
    if (size := sum(len(name) + len(value) for name, value in headers)) > _HEADER_BYTES:
        return f"the request headers must have at most {_HEADER_BYTES} bytes, got {size}"
    if len(scope.get("raw_path") or b"") + len(scope.get("query_string", b"")) > _PATH_BYTES:
        return f"the request path must have at most {_PATH_BYTES} bytes"
    return ""
