"""Limits of a key: what is asked too fast may come again, and what does not fit is refused in words.

A rate never fails what was accepted: it only refuses what comes next, with the seconds after which it has a chance.
"""

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from twinkle_server.errors import BadRequest, Busy, Forbidden
from twinkle_server.operations import Kind
from twinkle_server.tenancy.auth import Caller

_BURST = 10.0  # seconds' worth of tokens that may come at once
_BUCKETS = 4096


@dataclass(frozen=True, slots=True)
class Quotas:
    """Limits of a key; None is the service's own.

    Attributes:
        tokens_per_second: of all operations, on average.
        operations: that wait or run at once, of the key's tenant.
        adapters: models that the tenant has at once.
        bytes: of the tenant's checkpoints.
        keep: newest checkpoints of a model and kind; older ones are deleted.
    """

    tokens_per_second: float | None = None
    operations: int | None = None
    adapters: int | None = None
    bytes: int | None = None
    keep: int | None = None

    @classmethod
    def read(cls, said: Mapping[str, Any]) -> Self:
        """Read the limits of a row.

        Raises:
            BadRequest: a name is unknown, or a value is no positive number.
        """
        names = [field.name for field in fields(cls)]
        for name, value in said.items():
            if name not in names:
                raise BadRequest(f"{name!r} is no quota; there are {', '.join(names)}")
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise BadRequest(f"the quota {name} is a positive number, and not {value!r}")
        whole = {name: value if name == "tokens_per_second" else int(value) for name, value in said.items()}
        return cls(**whole)


@dataclass(slots=True)
class _Bucket:
    level: float
    at: float


class Meter:
    """Compares what keys ask for with their limits.

    Args:
        pending: returns the operations of a tenant that wait or run.
        adapters: returns the models that a tenant has.
        stored: returns the bytes of a tenant's checkpoints.
        clock: seconds.
    """

    def __init__(
        self,
        pending: Callable[[str], int],
        adapters: Callable[[str], Awaitable[int]],
        stored: Callable[[str], Awaitable[int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pending = pending
        self._adapters = adapters
        self._stored = stored
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}

    async def check(self, caller: Caller, kind: Kind) -> None:
        """Let an operation of a key pass, or say why not.

        Raises:
            Busy: it may come again later.
            Forbidden: something must be given up first.
        """
        if not caller.quotas:
            return
        quotas = Quotas.read(caller.quotas)
        if quotas.tokens_per_second is not None:
            self._check_rate(caller, quotas.tokens_per_second)
        if quotas.operations is not None and (found := self._pending(caller.tenant)) >= quotas.operations:
            raise Busy(f"{found} of your operations wait or run, and {quotas.operations} is this key's limit")
        if kind == "create" and quotas.adapters is not None:
            _check_room(await self._adapters(caller.tenant), quotas.adapters, "adapters", "finish a session first")
        if kind == "save" and quotas.bytes is not None:
            _check_room(await self._stored(caller.tenant), quotas.bytes, "bytes of checkpoints", "delete some first")

    def charge(self, caller: Caller, tokens: int) -> None:
        """Take the tokens of an operation that was accepted; a large one may leave a debt."""
        if rate := caller.quotas.get("tokens_per_second"):
            self._bucket(caller, float(rate)).level -= tokens

    def _check_rate(self, caller: Caller, rate: float) -> None:
        level = self._bucket(caller, rate).level
        if level < 0:
            raise Busy(f"this key may use {rate:g} tokens a second, and has used more", retry_after=-level / rate)

    def _bucket(self, caller: Caller, rate: float) -> _Bucket:
        now, full = self._clock(), rate * _BURST
        bucket = self._buckets.get(caller.key)
        if bucket is None:
            if len(self._buckets) >= _BUCKETS:  # full ones say nothing that a new one would not
                self._buckets = {key: each for key, each in self._buckets.items() if each.level < 0}
            bucket = self._buckets[caller.key] = _Bucket(full, now)
        bucket.level = min(full, bucket.level + (now - bucket.at) * rate)
        bucket.at = now
        return bucket


def _check_room(found: int, limit: int, what: str, remedy: str) -> None:
    if found >= limit:
        raise Forbidden(f"you have {found} {what}, and {limit} is this key's limit: {remedy}")
