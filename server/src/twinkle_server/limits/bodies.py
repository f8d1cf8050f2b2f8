"""ASGI middleware that reads a body whole, within bounds of size, time and memory, before the application begins."""

import asyncio
import time
from typing import Any

from twinkle_server.errors import BadRequest, ServiceError, TooLarge
from twinkle_server.limits.budget import Budget, Share
from twinkle_server.limits.depth import check_depth, is_flat
from twinkle_server.limits.parts import check_parts
from twinkle_server.limits.refusal import refuse
from twinkle_server.limits.turnstile import Turnstile
from twinkle_server.limits.weight import check_weight
from twinkle_server.limits.zstd import decompress
from twinkle_server.settings import Limits
from twinkle_server.tenancy.auth import header

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
            raise BadRequest(f"Content-Encoding {encoding[:40]!r} is not read here; send zstd, or the body as it is")
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
