"""Prometheus metrics, and the middleware that counts and logs requests.

Tenants appear as pseudonyms, up to a maximum number.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from twinkle_server.telemetry.logs import OPERATION, REQUEST, LineLimiter, tenant_mark
from twinkle_server.telemetry.window import Window
from twinkle_server.tenancy.auth import Caller

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128)
_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
_TENANTS = 256
OTHERS = "others"


class Metrics:
    """The metrics of a service.

    Attributes:
        window: rates of the last minutes.

    Args:
        secret: of the data folder, for pseudonyms of tenants.
    """

    def __init__(self, secret: bytes) -> None:
        self.window = Window()
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._secret = secret
        self._marks: dict[str, str] = {}
        self._answers: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}
        self.spent: Callable[[str, int, str], None] = lambda kind, tokens, tenant: None
        self.ended: Callable[[str], None] = lambda tenant: None
        self.registry = registry = CollectorRegistry()
        self._operations = _counter(registry, "operations", "Finished operations.", "kind", "outcome")
        self._waited = _histogram(
            registry, "operation_seconds", "Seconds from acceptance to the result.", _SECONDS, "kind"
        )
        self._tokens = _counter(registry, "tokens", "Tokens of successful operations.", "kind")
        self._of_tenants = _counter(registry, "tenant_tokens", "Tokens of successful operations per tenant.", "tenant")
        self._passes = _histogram(registry, "pass_seconds", "Duration of engine passes.", _SECONDS, "kind")
        self._fill = _histogram(registry, "pass_fill", "Share of useful tokens among computed tokens.", _SHARES, "kind")
        self._pass_tenants = _histogram(registry, "pass_tenants", "Tenants per engine pass.", _COUNTS, "kind")
        self._pass_operations = _histogram(registry, "pass_operations", "Operations per engine pass.", _COUNTS, "kind")
        self._pass_tokens = _counter(registry, "pass_tokens", "Useful tokens of engine passes.", "kind")
        self._flops = _counter(registry, "pass_flops", "Floating-point operations of the model.", "kind")
        self._swaps = _counter(registry, "swaps", "Models paged into or out of the engine.", "direction")
        self._replays = _counter(registry, "replays", "Operations replayed to rebuild a model.")
        self._restarts = _counter(registry, "engine_restarts", "Restarts of the engine process.", "reason")
        self._snapshots = _counter(registry, "snapshot_bytes", "Bytes written as snapshots.")
        self._http = _counter(registry, "http_requests", "HTTP requests.", "method", "route", "status")
        self._http_seconds = _histogram(
            registry, "http_seconds", "Seconds until the response started.", _SECONDS, "route"
        )

    def finished(self, kind: str, outcome: str, seconds: float, tokens: int, tenant: str) -> None:
        """Count an operation that ended.

        Args:
            kind: of the operation.
            outcome: "done", "cancelled", or the category of its failure.
            seconds: since it was written into the log.
            tokens: its cost.
            tenant: its owner.
        """
        self.window.finished(kind, outcome, seconds, tokens, tenant)
        self._operations.labels(kind, outcome).inc()
        self._waited.labels(kind).observe(max(0.0, seconds))
        self.ended(tenant)
        if outcome == "done" and tokens:
            self.spent(kind, tokens, tenant)
            self._tokens.labels(kind).inc(tokens)
            self._of_tenants.labels(self.mark(tenant)).inc(tokens)

    def passed(self, head: Mapping[str, Any]) -> None:
        """Count a pass of the engine, described by the head of its message `passed`."""
        kind, tokens, padded = str(head.get("kind", "")), int(head.get("tokens", 0)), int(head.get("padded", 0))
        self.window.passed(head)
        self._passes.labels(kind).observe(float(head.get("seconds", 0.0)))
        if tokens + padded:
            self._fill.labels(kind).observe(tokens / (tokens + padded))
            self._pass_tokens.labels(kind).inc(tokens)
        self._pass_tenants.labels(kind).observe(_count(head.get("tenants", 1)))
        self._pass_operations.labels(kind).observe(_count(head.get("operations", 1)))
        self._flops.labels(kind).inc(max(0.0, float(head.get("flops", 0.0))))

    def progressed(self, head: Mapping[str, Any]) -> None:
        """Count what the engine has computed of passes that go on, described by the head of its message `progress`."""
        self.window.progressed(head)

    def restored(self) -> None:
        """Count a model that was restored in the engine."""
        self._swaps.labels("in").inc()

    def detached(self) -> None:
        """Count a model that the engine freed."""
        self._swaps.labels("out").inc()

    def replayed(self, count: int = 1) -> None:
        """Count replayed operations."""
        self._replays.inc(count)

    def restarted(self, reason: str) -> None:
        """Count a restart of the engine; `reason` is a label with few values."""
        self.window.restarted()
        self._restarts.labels(reason).inc()

    def snapshotted(self, size: int) -> None:
        """Count the bytes of a snapshot."""
        self._snapshots.inc(size)

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request; `route` is a template, not the requested path."""
        series = self._answers.get((method, route, status))
        if series is None:  # a lookup by labels costs more than counting
            series = self._http.labels(method, route, str(status)), self._http_seconds.labels(route)
            self._answers[method, route, status] = series
        series[0].inc()
        series[1].observe(seconds)

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a gauge whose value is read on every scrape."""
        Gauge(f"twinkle_{name}", text, registry=self.registry).set_function(read)

    def mark(self, tenant: str) -> str:
        """Return the pseudonym of a tenant; after `_TENANTS` tenants, one for all others."""
        mark = self._marks.get(tenant)
        if mark is None:
            if len(self._marks) >= _TENANTS:
                return OTHERS
            mark = self._marks[tenant] = tenant_mark(tenant, self._secret)
        return mark

    def write(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self.registry)


def _count(value: Any) -> int:
    return len(value) if isinstance(value, (list, tuple)) else int(value)


def _counter(registry: CollectorRegistry, name: str, text: str, *labels: str) -> Counter:
    return Counter(f"twinkle_{name}", text, labels, registry=registry)


def _histogram(
    registry: CollectorRegistry, name: str, text: str, buckets: tuple[float, ...], *labels: str
) -> Histogram:
    return Histogram(f"twinkle_{name}", text, labels, registry=registry, buckets=buckets)


UNMATCHED = "unmatched"
_READY = "/readyz"
"""Its status is an answer: probes of a service that loads its model for minutes are not refused."""
_METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"})
_log = structlog.get_logger(__name__)


class TelemetryMiddleware:
    """Counts every request by its route template, and sets the request id of log lines.

    Args:
        app: the next application.
        metrics: counts the requests.
    """

    def __init__(self, app: Any, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics
        self._limiter = LineLimiter("refused requests")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        REQUEST.set(scope.get("request_id"))
        OPERATION.set(None)
        began, status, seconds = time.perf_counter(), 0, 0.0

        async def observe(message: Any) -> None:
            nonlocal status, seconds
            if message["type"] == "http.response.start":
                status, seconds = message["status"], time.perf_counter() - began
            await send(message)

        try:
            await self._app(scope, receive, observe)
        finally:
            self._count(scope, status, seconds or time.perf_counter() - began)

    def _count(self, scope: Any, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", None) or UNMATCHED
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._metrics.answered(method, route, status, seconds)
        if status < 400 or route == _READY or not self._limiter.take():
            return
        caller = scope.get("caller")
        tenant = caller.tenant if isinstance(caller, Caller) else None
        write = _log.error if status >= 500 and status != 503 else _log.info
        fields = {"method": method, "route": route, "status": status, "seconds": round(seconds, 4)}
        write("refused", outcome="refused", tenant=tenant, **fields, **(OPERATION.get() or {}))
