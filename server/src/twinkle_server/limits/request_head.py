"""ASGI middleware that names every request and bounds its head."""

from typing import Any

from twinkle_server.errors import ServiceError
from twinkle_server.ids import new_id
from twinkle_server.limits.refusal import refuse

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
