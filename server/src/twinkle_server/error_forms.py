"""Bodies of error responses in the form of each protocol: Tinker's, OpenAI's, or Anthropic's."""

import math
from typing import Any

import orjson

from twinkle_server.errors import Busy, ServiceError

PREFIX = "/v1"
ANTHROPIC = f"{PREFIX}/messages"
_SHARED = f"{PREFIX}/models"
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_OPENAI_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}
_ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error",
}  # fmt: skip


def is_chat(path: str) -> bool:
    """Return whether a path belongs to the chat endpoints."""
    return path == PREFIX or path.startswith(f"{PREFIX}/")


def error_path(scope: Any) -> str:
    """Return the path that decides the form of a request's errors.

    It is the path of the request, or `ANTHROPIC` for paths that both chat APIs have, if the header `anthropic-version`
    shows that the client is one of Anthropic's API.
    """
    path: str = scope.get("path", "")
    return ANTHROPIC if is_shared(path) and is_anthropic(scope) else path


def is_shared(path: str) -> bool:
    """Return whether both chat APIs have a path."""
    return path == _SHARED or path.startswith(f"{_SHARED}/")


def is_anthropic(scope: Any) -> bool:
    """Return whether the client of a request is one of Anthropic's API."""
    return any(name == b"anthropic-version" for name, _ in scope["headers"])


def status_of(path: str, status: int) -> int:
    """Return the status of an error; chat clients expect 400 for every invalid request."""
    return 400 if status == 422 and is_chat(path) else status


def form(path: str, status: int, message: str, error: ServiceError | None = None) -> dict[str, Any]:
    """Return the body of an error response.

    Args:
        path: of the request.
        status: of the response.
        message: for the client.
        error: the error; its attributes `param` and `code`, if it has them, are part of OpenAI's form, and `details`
            of Anthropic's.
    """
    if path == ANTHROPIC or path.startswith(f"{ANTHROPIC}/"):
        kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
        details = getattr(error, "details", None)
        more = {} if details is None else {"details": details}
        return {"type": "error", "error": {"type": kind, "message": message, **more}}
    if not is_chat(path):
        name = getattr(error, "kind", None)
        return {"detail": message} if name is None else {"detail": message, "error": name}
    kind = _OPENAI_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    return {"error": {"message": message, "type": kind, "param": param, "code": code or _OPENAI_CODES.get(status)}}


async def refuse(send: Any, error: ServiceError, path: str) -> None:
    """Respond with an error; the rest of the request's body is dropped."""
    status = status_of(path, error.status)
    body = orjson.dumps(form(path, status, error.message, error))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if isinstance(error, Busy):
        headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after))).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
