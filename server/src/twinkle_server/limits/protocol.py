"""Connections that send their head slowly or without end, which uvicorn itself would wait for."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

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
