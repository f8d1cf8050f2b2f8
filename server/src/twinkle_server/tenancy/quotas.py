"""Quotas of keys: requests above a rate are rejected temporarily, operations above a size limit fail.

A rate never fails accepted operations; it delays the next ones, with the seconds after which to retry.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Self

from sqlalchemy import Connection, func, or_, select

from twinkle_server.errors import BadRequest, Busy, Forbidden
from twinkle_server.operations import Accepted, Embed, Generate, Kind, ModelInfo, Submission
from twinkle_server.ports import Service
from twinkle_server.runtime.generations import Generation
from twinkle_server.store.records import Key
from twinkle_server.store.tables import checkpoints, models
from twinkle_server.telemetry.logs import OPERATION, log_accepted, names
from twinkle_server.tenancy.auth import CURRENT, Caller

_BURST = 10.0  # seconds of the rate that may be used at once
_BUCKETS = 4096
_REFUSALS, _REFUSALS_AT_ONCE = 20.0, 4096.0  # invalid requests of a tenant per second, and at once


@dataclass(frozen=True, slots=True)
class Quotas:
    """Quotas of a key; None means only the service's own limits.

    Attributes:
        tokens_per_second: average rate of all operations.
        operations: maximum number of unfinished operations of the tenant.
        adapters: maximum number of models of the tenant.
        bytes: maximum size of all checkpoints of the tenant.
        keep: number of newest checkpoints per model and kind; older ones are deleted.
        weight: share of the computed tokens when several tenants wait; None is 1. Of several keys of a tenant, the
            largest counts.
        rollouts: maximum number of recorded rows of a run; 0 records none. It cannot exceed the service's own limit. Of
            several keys of a tenant, the smallest counts.
    """

    tokens_per_second: float | None = None
    operations: int | None = None
    adapters: int | None = None
    bytes: int | None = None
    keep: int | None = None
    weight: float | None = None
    rollouts: int | None = None

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Validate the quotas of a row.

        Raises:
            BadRequest: a name is unknown, or a value is not a positive number.
        """
        names = [field.name for field in fields(cls)]
        for name, value in values.items():
            if name not in names:
                raise BadRequest(f"unknown quota {name!r}; available: {', '.join(names)}")
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if name in ZERO and number and value == 0:
                continue
            if not number or not 0 < value < float("inf"):
                least = "0 or a positive number" if name in ZERO else "a positive number"
                raise BadRequest(f"the quota {name} must be {least}, got {value!r}")
            if name not in FRACTIONS and value != int(value):
                raise BadRequest(f"the quota {name} must be a whole number, got {value!r}")
        low, high = WEIGHTS
        if not low <= values.get("weight", 1.0) <= high:
            raise BadRequest(f"the weight must be between {low:g} and {high:g}, got {values['weight']!r}")
        converted = {name: value if name in FRACTIONS else int(value) for name, value in values.items()}
        return cls(**converted)


FRACTIONS = frozenset({"tokens_per_second", "weight"})
"""Quotas that need not be whole numbers."""
ZERO = frozenset({"rollouts"})
"""Quotas that may be 0."""
WEIGHTS = (0.01, 1000.0)
"""Smallest and largest weight."""


def weights_of(keys: Sequence[Key]) -> dict[str, float]:
    """Return the weights of tenants that are not 1, from their keys."""
    weights: dict[str, float] = {}
    for key in keys:
        weight = float(key.quotas.get("weight") or 1.0)
        weights[key.tenant] = max(weight, weights.get(key.tenant, weight))
    return {tenant: weight for tenant, weight in weights.items() if weight != 1.0}


def rollouts_of(keys: Sequence[Key]) -> dict[str, int]:
    """Return the maximum number of recorded rows of a run of each tenant whose keys limit it.

    Args:
        keys: revoked ones, too: they count for a tenant that has no others, whose operations may not have ended.
    """
    active = {key.tenant for key in keys if key.revoked is None}
    limits: dict[str, int] = {}
    for key in keys:
        if key.revoked is not None and key.tenant in active:
            continue
        if (limit := key.quotas.get("rollouts")) is not None:
            limits[key.tenant] = min(int(limit), limits.get(key.tenant, int(limit)))
    return limits


@dataclass(slots=True)
class _Bucket:
    level: float
    at: float


class Meter:
    """Enforces the rate quotas of keys.

    Args:
        pending: returns the number of unfinished operations of a tenant.
        clock: returns seconds.
    """

    def __init__(self, pending: Callable[[str], int], clock: Callable[[], float] = lambda: time.monotonic()) -> None:
        self._pending = pending
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}

    def verdict(self, caller: Caller) -> Busy | None:
        """Return why a new operation of a key must wait; None admits it."""
        quotas = Quotas.read(caller.quotas)
        if quotas.tokens_per_second is not None:
            rate = quotas.tokens_per_second
            level = self._bucket(caller.key, rate, rate * _BURST).level
            if level < 0:
                return Busy(
                    f"token rate exceeded: this key is limited to {rate:.15g} tokens per second",
                    retry_after=-level / rate,
                )
        if quotas.operations is not None and (pending := self._pending(caller.tenant)) >= quotas.operations:
            return Busy(f"too many unfinished operations: you have {pending} (limit of this key: {quotas.operations})")
        return None

    def charge(self, caller: Caller, tokens: int) -> None:
        """Charge the tokens of an accepted operation; a large one may leave a debt."""
        if rate := caller.quotas.get("tokens_per_second"):
            self._bucket(caller.key, float(rate), rate * _BURST).level -= tokens

    def refused(self, tenant: str) -> None:
        """Charge a refused operation, which was written to the log."""
        self._refusals(tenant).level -= 1

    def refusals(self, tenant: str) -> Busy | None:
        """Return why a refused operation must wait, since each of them adds a row; None admits it."""
        if (level := self._refusals(tenant).level) >= 1:
            return None
        return Busy("too many invalid requests", retry_after=(1 - level) / _REFUSALS)

    def _refusals(self, tenant: str) -> _Bucket:
        return self._bucket(f"refusals of {tenant}", _REFUSALS, _REFUSALS_AT_ONCE)

    def _bucket(self, name: str, rate: float, full: float) -> _Bucket:
        now = self._clock()
        bucket = self._buckets.get(name)
        if bucket is None:
            if len(self._buckets) >= _BUCKETS:  # a full bucket is equal to a new one
                self._buckets = {key: other for key, other in self._buckets.items() if other.level < 0}
            bucket = self._buckets[name] = _Bucket(full, now)
        bucket.level = min(full, bucket.level + (now - bucket.at) * rate)
        bucket.at = now
        return bucket


def check_quotas(connection: Connection, caller: Caller, kind: Kind, now: float, adapters: int | None = None) -> None:
    """Check the size quotas of a key for a new operation, in the transaction that writes it.

    Args:
        connection: of that transaction.
        caller: the caller.
        kind: of the operation.
        now: UTC seconds.
        adapters: limit of the service for keys without a quota of adapters; None is no limit.

    Raises:
        Forbidden: a quota is exceeded.
    """
    quotas = Quotas.read(caller.quotas)
    most, whose = (adapters, "service") if quotas.adapters is None else (quotas.adapters, "key")
    if kind == "create" and most is not None:
        _check(count_adapters(connection, caller.tenant), most, "adapters", "finish a session first", whose)
    if kind == "save" and quotas.bytes is not None:
        stored = checkpoints.c.deleted.is_(None) & or_(checkpoints.c.expires.is_(None), checkpoints.c.expires > now)
        total = select(func.coalesce(func.sum(checkpoints.c.size), 0)).where(
            checkpoints.c.tenant == caller.tenant, stored
        )
        _check(connection.execute(total).scalar_one(), quotas.bytes, "bytes of checkpoints", "delete some first")


def count_adapters(connection: Connection, tenant: str) -> int:
    """Return how many models of a tenant are in memory or will be."""
    alive = models.c.status.in_(("creating", "live"))
    count: int = connection.execute(select(func.count()).where(models.c.tenant == tenant, alive)).scalar_one()
    return count


def _check(used: int, limit: int, what: str, remedy: str, whose: str = "key") -> None:
    if used >= limit:
        raise Forbidden(f"quota exceeded: you have {used} {what} (limit of this {whose}: {limit}); {remedy}")


InTransaction = Callable[[Any], None]


class Limited:
    """A `ports.Service` that enforces quotas before another one.

    Retries of an accepted request are never rejected.

    Args:
        service: the service.
        meter: enforces rate quotas.
        adapters: maximum number of models of a tenant whose key has no quota of them; None is no limit.
    """

    def __init__(self, service: Service, meter: Meter, adapters: int | None = None) -> None:
        self._service = service
        self._adapters = adapters
        self._meter = meter
        self.wait = service.wait
        self.cancel = service.cancel
        self.queue_state = service.queue_state
        self.finish_session = service.finish_session
        self.heartbeat = service.heartbeat
        self.awaited = service.awaited
        self.submit_next = service.submit_next  # unload, which only frees resources

    @property
    def info(self) -> ModelInfo:
        """The base model."""
        return self._service.info

    async def submit(self, submission: Submission, in_transaction: InTransaction | None = None) -> Accepted:
        """Submit an operation; one that exceeds a size quota is refused, because its number must be used up.

        Raises:
            Busy: a rate quota is exceeded.
            Forbidden: a model to be created exceeds a quota.
        """
        OPERATION.set(names(submission))
        accepted = await self._admitted(submission, in_transaction)
        log_accepted(submission, accepted)
        return accepted

    async def reserve(self, tenant: str, model: str) -> None:
        """Reserve the service for a full-parameter model; see `Service.reserve`."""
        await self._service.reserve(tenant, model)

    async def generate(self, tenant: str, generate: Generate | Embed) -> Generation:
        """Send a streamed request; its tokens are charged as they are read.

        Raises:
            Busy: a rate quota is exceeded.
        """
        caller = CURRENT.get()
        if caller is None or not caller.quotas:
            return await self._service.generate(tenant, generate)
        if (verdict := self._meter.verdict(caller)) is not None:
            raise verdict
        generation = await self._service.generate(tenant, generate)
        self._meter.charge(caller, generation.prompt)
        generation.charge = partial(self._meter.charge, caller)
        return generation

    async def _admitted(self, submission: Submission, in_transaction: InTransaction | None) -> Accepted:
        if submission.refusal is not None:
            return await self._refused(submission)
        caller = CURRENT.get()
        limited = submission.kind == "create" and self._adapters is not None
        if caller is None or not (caller.quotas or limited) or submission.kind == "unload":
            return await self._service.submit(submission, in_transaction)
        try:
            accepted = await self._service.submit(submission, self._guarded(caller, submission, in_transaction))
        except Forbidden as error:
            if submission.kind == "create":
                raise
            return await self._refused(replace(submission, refusal=error.message))
        if accepted.fresh:
            self._meter.charge(caller, submission.tokens)
        return accepted

    async def _refused(self, submission: Submission) -> Accepted:
        """Submit a refused operation; if later operations wait for its number, it is always admitted."""
        verdict = None if self._service.awaited(submission) else self._meter.refusals(submission.tenant)
        if verdict is not None:
            raise verdict
        accepted = await self._service.submit(submission)
        if accepted.fresh:
            self._meter.refused(submission.tenant)
        return accepted

    def _guarded(self, caller: Caller, submission: Submission, in_transaction: InTransaction | None) -> InTransaction:
        verdict = None if self._service.awaited(submission) else self._meter.verdict(caller)

        def guarded(connection: Any) -> None:
            if verdict is not None:
                raise verdict
            check_quotas(connection, caller, submission.kind, time.time(), self._adapters)
            if in_transaction is not None:
                in_transaction(connection)

        return guarded
