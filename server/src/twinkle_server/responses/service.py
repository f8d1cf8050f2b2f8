"""Responses of probes and of routes for operators."""

from typing import Literal

from pydantic import ConfigDict

from twinkle_server.responses.base import Answer


class Path(Answer):
    """The check of a fast path, with the numbers that it measured."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    path: str
    exact: bool
    reason: str
    summary: str


class Health(Answer):
    """The parts of the service."""

    engine: str
    last_pass: str
    store: str
    draining: bool
    paths: list[Path]


class Ready(Health):
    """Whether the service can do work."""

    status: Literal["ready", "not ready"]


class Waiting(Answer):
    """Operations that wait or run."""

    waiting: int
    oldest_seconds: float


class Stored(Answer):
    """Checkpoints."""

    count: int
    bytes: int


class Entries(Answer):
    """Folders."""

    entries: int
    bytes: int


class TenantUse(Answer):
    """What a tenant uses, in total and today."""

    trained_tokens: int
    trained_tokens_today: int
    sampled_tokens: int
    sampled_tokens_today: int
    requests: int
    requests_today: int
    models: int
    waiting: int
    weight: float | None
    checkpoints: Stored


class Status(Health):
    """The figures of the service."""

    ready: bool
    up_seconds: float
    engine_restarts: int
    open_futures: int
    polls: int
    in_engine: int
    replays: int
    queues: int
    streams: int
    sessions: dict[str, int]
    models: dict[str, int]
    operations: Waiting
    checkpoints: Stored
    keys: int
    tenants: dict[str, TenantUse]
    trash: Entries
    orphans: Entries | None = None


class Rates(Answer):
    """Rates of the last minute; latencies are medians and 99th percentiles, for operators."""

    tokens_per_second: float
    operations_per_second: float
    failures: int
    passes_per_second: float
    pass_tokens: float
    pass_fill: float
    pass_tenants: float
    pass_operations: float
    busy: float
    history: list[float]
    latency_ms: dict[str, tuple[float, float]] | None = None


class Queue(Answer):
    """Operations without an outcome."""

    unfinished: int
    in_engine: int
    running: int | None = None
    oldest_seconds: float


class TenantRow(Answer):
    """A tenant."""

    tenant: str
    live: int
    detached: int
    unfinished: int
    tokens_per_second: float
    tokens_today: int
    checkpoint_bytes: int
    keys: int


class ModelRow(Answer):
    """A model, and where its adapter is."""

    model: str
    tenant: str
    status: str
    reason: str | None
    place: str
    bytes: int
    rank: int
    unfinished: int
    last_request: float


class ErrorRow(Answer):
    """An operation that failed."""

    time: float
    tenant: str
    model: str
    number: int
    kind: str
    category: str | None
    error: str | None


class Overview(Health):
    """What `twinkle top` shows; `scope` is a tenant, or null for all."""

    time: float
    model: str
    scope: str | None
    ready: bool
    up_seconds: float
    engine_restarts: int
    rates: Rates
    queue: Queue
    tenants: list[TenantRow]
    models: list[ModelRow]
    models_total: int
    errors: list[ErrorRow]
