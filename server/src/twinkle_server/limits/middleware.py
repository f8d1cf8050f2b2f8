"""ASGI middleware that bounds what a request may be: its head, its body, and when it may come."""

import asyncio
import time
from typing import Any

from twinkle_server.errors import BadRequest, ServiceError, TooLarge, refuse
from twinkle_server.ids import new_id
from twinkle_server.limits.body_checks import check_depth, check_parts, check_weight, is_flat
from twinkle_server.limits.memory import Budget, Share, Turnstile
from twinkle_server.limits.zstd import decompress
from twinkle_server.runtime.arrivals import Arrivals
from twinkle_server.settings import Limits
from twinkle_server.tenancy.auth import Caller, header

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
"""Paths of the requests that have a number in the queue of a model."""


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


_GRACE = 30.0  # seconds that a body may take, whatever its size
_SLOWEST = 64 * 2**10  # bytes a second beyond that
_ON_A_THREAD = 96 * 2**10  # larger ones would hold up the loop; a pass of 4,096 tokens has 64
_PARTS = 64  # of a row; those that are meant have up to 30
PASSES = frozenset({"/api/v1/forward_backward", "/api/v1/forward"})
"""Paths whose bodies may be protobuf; all others are JSON, whatever they call themselves."""


class _Timeout(ServiceError):
    status = 408


class _Left(Exception):
    """The client is gone."""


class BodyLimitMiddleware:
    """Gives the application a body that is complete, decompressed and small enough, or answers instead of it.

    Args:
        app: what comes behind it.
        limits: sizes.
        budget: bytes over all requests; each body counts until its request is answered.
    """

    def __init__(self, app: Any, limits: Limits, budget: Budget | None = None) -> None:
        self._app = app
        self._limits = limits
        self._turnstile = Turnstile()
        self.budget = budget or Budget(limits.inflight_bytes)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        share = Share(self.budget)
        try:
            body = await self._body(scope, receive, share)
        except ServiceError as error:
            share.close()
            await refuse(send, error)
            return
        except _Left:
            share.close()
            return
        try:
            if len(body) > _ON_A_THREAD:
                await self._turnstile.through()
            await self._app(scope, _replay(body, receive), send)
        finally:
            share.close()

    async def _body(self, scope: Any, receive: Any, share: Share) -> bytes:
        encoding = (header(scope, b"content-encoding") or "identity").strip().lower()
        if encoding not in ("identity", "zstd"):
            raise BadRequest(f"Content-Encoding must be zstd or absent, got {encoding[:40]!r}")
        declared = header(scope, b"content-length") or "0"
        if declared.isdecimal() and int(declared) > self._limits.body_bytes:
            raise self._too_large()
        body = await self._read(receive, share)
        if encoding == "zstd":
            scope["headers"] = [
                (name, value)
                for name, value in scope["headers"]
                if name not in (b"content-encoding", b"content-length")
            ]
            packed, body = body, await asyncio.to_thread(decompress, body, self._limits.decompressed_bytes, share.take)
            share.give(len(packed))
        large = len(body) > _ON_A_THREAD
        if scope["path"] in PASSES and "protobuf" in (header(scope, b"content-type") or ""):
            if large:
                await asyncio.to_thread(check_parts, body, _PARTS * self._limits.datums)
        elif large or not is_flat(body):
            await asyncio.to_thread(self._check_json, body, share)
        return body

    def _check_json(self, body: bytes, share: Share) -> None:
        check_depth(body)
        if len(body) > _ON_A_THREAD:
            check_weight(body, self.budget.size - share.taken, share.take)

    async def _read(self, receive: Any, share: Share) -> bytes:
        pieces: list[bytes] = []
        began = time.monotonic()
        while True:
            allowed = _GRACE + share.taken / _SLOWEST
            if pieces:
                await self._turnstile.through()
            try:
                async with asyncio.timeout(began + allowed - time.monotonic()):
                    message = await receive()
            except TimeoutError as error:
                raise _Timeout(f"the body came too slowly: {share.taken} bytes in {allowed:.0f} s") from error
            if message["type"] == "http.disconnect":
                raise _Left
            piece = message.get("body", b"")
            if share.taken + len(piece) > self._limits.body_bytes:
                raise self._too_large()
            share.take(len(piece))
            if not message.get("more_body", False):
                return b"".join((*pieces, piece)) if pieces else piece
            pieces.append(piece)

    def _too_large(self) -> TooLarge:
        return TooLarge(f"the body is larger than {self._limits.body_bytes} bytes; send fewer rows at a time")


def _replay(body: bytes, receive: Any) -> Any:
    """Return an ASGI `receive` that gives the body once, and then what the connection says."""
    given = False

    async def again() -> Any:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
