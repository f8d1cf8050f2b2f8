"""Limits of a key: what is asked too fast may come again, and what does not fit is refused in words.

A rate never fails what was accepted: it only refuses what comes next, with the seconds after which it has a chance.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from sqlalchemy import Connection, func, or_, select

from twinkle_server.errors import BadRequest, Busy, Forbidden
from twinkle_server.operations import Accepted, Kind, ModelInfo, Submission
from twinkle_server.ports import Service
from twinkle_server.store.tables import checkpoints, models
from twinkle_server.telemetry.logs import ASKED, log_taken, names
from twinkle_server.tenancy.auth import CURRENT, Caller

_BURST = 10.0  # seconds' worth of tokens that may come at once
_BUCKETS = 4096
_REFUSALS, _REFUSALS_AT_ONCE = 20.0, 4096.0  # of a tenant, a second and at once


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
                raise BadRequest(f"unknown quota {name!r}; available: {', '.join(names)}")
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise BadRequest(f"the quota {name} must be a positive number, got {value!r}")
        whole = {name: value if name == "tokens_per_second" else int(value) for name, value in said.items()}
        return cls(**whole)


@dataclass(slots=True)
class _Bucket:
    level: float
    at: float


class Meter:
    """Compares how much keys ask for with their limits.

    Args:
        pending: returns the operations of a tenant that wait or run.
        clock: seconds.
    """

    def __init__(self, pending: Callable[[str], int], clock: Callable[[], float] = lambda: time.monotonic()) -> None:
        self._pending = pending
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}

    def verdict(self, caller: Caller) -> Busy | None:
        """Return why a new operation of a key must come later; None lets it pass."""
        quotas = Quotas.read(caller.quotas)
        if quotas.tokens_per_second is not None:
            rate = quotas.tokens_per_second
            level = self._bucket(caller.key, rate, rate * _BURST).level
            if level < 0:
                return Busy(
                    f"token rate exceeded: this key is limited to {rate:g} tokens per second", retry_after=-level / rate
                )
        if quotas.operations is not None and (found := self._pending(caller.tenant)) >= quotas.operations:
            return Busy(f"too many unfinished operations: you have {found} (limit of this key: {quotas.operations})")
        return None

    def charge(self, caller: Caller, tokens: int) -> None:
        """Take the tokens of an operation that was accepted; a large one may leave a debt."""
        if rate := caller.quotas.get("tokens_per_second"):
            self._bucket(caller.key, float(rate), rate * _BURST).level -= tokens

    def refused(self, tenant: str) -> None:
        """Count an operation that was written into the log as one that fails."""
        self._refusals(tenant).level -= 1

    def refusals(self, tenant: str) -> Busy | None:
        """Return why an operation that fails anyway must come later: each is a row, and costs nothing else."""
        if (level := self._refusals(tenant).level) >= 1:
            return None
        return Busy("too many invalid requests", retry_after=(1 - level) / _REFUSALS)

    def _refusals(self, tenant: str) -> _Bucket:
        return self._bucket(f"refusals of {tenant}", _REFUSALS, _REFUSALS_AT_ONCE)

    def _bucket(self, name: str, rate: float, full: float) -> _Bucket:
        now = self._clock()
        bucket = self._buckets.get(name)
        if bucket is None:
            if len(self._buckets) >= _BUCKETS:  # full ones say nothing that a new one would not
                self._buckets = {key: each for key, each in self._buckets.items() if each.level < 0}
            bucket = self._buckets[name] = _Bucket(full, now)
        bucket.level = min(full, bucket.level + (now - bucket.at) * rate)
        bucket.at = now
        return bucket


def check_room(connection: Connection, caller: Caller, kind: Kind, now: float) -> None:
    """Refuse a new operation for which a key has no room; in the transaction that writes it.

    Args:
        connection: of that transaction.
        caller: who asks.
        kind: of the operation.
        now: UTC seconds.

    Raises:
        Forbidden: something must be given up first.
    """
    quotas = Quotas.read(caller.quotas)
    if kind == "create" and quotas.adapters is not None:
        alive = models.c.status.in_(("creating", "live"))
        found = connection.execute(select(func.count()).where(models.c.tenant == caller.tenant, alive)).scalar_one()
        _check(found, quotas.adapters, "adapters", "finish a session first")
    if kind == "save" and quotas.bytes is not None:
        there = checkpoints.c.deleted.is_(None) & or_(checkpoints.c.expires.is_(None), checkpoints.c.expires > now)
        total = select(func.coalesce(func.sum(checkpoints.c.size), 0)).where(
            checkpoints.c.tenant == caller.tenant, there
        )
        _check(connection.execute(total).scalar_one(), quotas.bytes, "bytes of checkpoints", "delete some first")


def _check(found: int, limit: int, what: str, remedy: str) -> None:
    if found >= limit:
        raise Forbidden(f"quota exceeded: you have {found} {what} (limit of this key: {limit}); {remedy}")


Also = Callable[[Any], None]


class Limited:
    """Stands in front of a service; see `ports.Service`.

    A request that came before and comes again is never refused here: it was let in already.

    Args:
        service: the one behind.
        meter: compares with quotas.
    """

    def __init__(self, service: Service, meter: Meter) -> None:
        self._service = service
        self._meter = meter
        self.wait = service.wait
        self.cancel = service.cancel
        self.queue_state = service.queue_state
        self.finish_session = service.finish_session
        self.heartbeat = service.heartbeat
        self.awaited = service.awaited
        self.submit_next = service.submit_next  # unload, which gives back

    @property
    def info(self) -> ModelInfo:
        """The base model."""
        return self._service.info

    async def submit(self, submission: Submission, also: Also | None = None) -> Accepted:
        """Submit an operation; what can never be done becomes a refusal, because its number must be used up.

        Raises:
            Busy: the key asks for too much at once.
            Forbidden: the key has no room for another model.
        """
        ASKED.set(names(submission))
        accepted = await self._admitted(submission, also)
        log_taken(submission, accepted)
        return accepted

    async def _admitted(self, submission: Submission, also: Also | None) -> Accepted:
        if submission.refusal is not None:
            return await self._refused(submission)
        caller = CURRENT.get()
        if caller is None or not caller.quotas or submission.kind == "unload":
            return await self._service.submit(submission, also)
        try:
            accepted = await self._service.submit(submission, self._guarded(caller, submission, also))
        except Forbidden as error:
            if submission.kind == "create":
                raise
            return await self._refused(replace(submission, refusal=error.message))
        if accepted.fresh:
            self._meter.charge(caller, submission.tokens)
        return accepted

    async def _refused(self, submission: Submission) -> Accepted:
        """Write an operation that fails; others may wait for its number, and then it is never too many."""
        verdict = None if self._service.awaited(submission) else self._meter.refusals(submission.tenant)
        if verdict is not None:
            raise verdict
        accepted = await self._service.submit(submission)
        if accepted.fresh:
            self._meter.refused(submission.tenant)
        return accepted

    def _guarded(self, caller: Caller, submission: Submission, also: Also | None) -> Also:
        verdict = None if self._service.awaited(submission) else self._meter.verdict(caller)

        def guarded(connection: Any) -> None:
            if verdict is not None:
                raise verdict
            check_room(connection, caller, submission.kind, time.time())
            if also is not None:
                also(connection)

        return guarded
