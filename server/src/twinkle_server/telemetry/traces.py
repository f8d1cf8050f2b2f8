"""OpenTelemetry traces: a span for each request, operation and pass. Imported only where traces are configured.

A request's span is the parent of the spans of its operations, which last from acceptance to the durable outcome and
tell when the engine began them. A pass has one span, a child of its oldest operation, with links to all its operations.
Spans have names, numbers and durations, never contents of requests.
"""

import os
import re
import time
from collections.abc import Collection, Mapping
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from twinkle_server.operations import Operation
from twinkle_server.settings import Settings
from twinkle_server.telemetry.metrics import UNMATCHED

_NANOSECONDS: Final = 1_000_000_000
_PATH: Final = "/v1/traces"
_QUIET: Final = ("/healthz", "/readyz", "/metrics", "/api/v1/healthz", "/ui/static/")
"""Beginnings of paths that are asked all the time and have no spans."""
_PARENT: Final = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


def parent_of(traceparent: str, tracestate: str = "") -> SpanContext | None:
    """Return the span that the headers of W3C Trace Context name; None if they are missing or invalid."""
    found = _PARENT.fullmatch(traceparent)
    if found is None or (found[1] == "00" and found[5]):
        return None
    state = TraceState.from_header([tracestate]) if tracestate else None
    flags = TraceFlags(int(found[4], 16) & TraceFlags.SAMPLED)
    context = SpanContext(int(found[2], 16), int(found[3], 16), is_remote=True, trace_flags=flags, trace_state=state)
    return context if context.is_valid else None


class Traces:
    """Records and sends spans.

    Args:
        processor: gets the spans that end.
        share: share of the traces that are recorded, if the client does not decide; None uses the environment.
    """

    def __init__(self, processor: SpanProcessor, share: float | None = None) -> None:
        sampler = None if share is None else ParentBased(TraceIdRatioBased(share))
        name = os.environ.get("OTEL_SERVICE_NAME", "twinkle")
        self._provider = TracerProvider(sampler=sampler, resource=Resource.create({"service.name": name}))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("twinkle_server")
        self._operations: dict[int, tuple[Span, float]] = {}
        self._began: list[SpanContext] = []
        self.propagator = TraceContextTextMapPropagator()

    @classmethod
    def of(cls, settings: Settings) -> "Traces":
        """Return the traces of a service, sent to its collector."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        endpoint = settings.otlp_endpoint
        if endpoint is not None and not endpoint.endswith(_PATH):
            endpoint = endpoint.rstrip("/") + _PATH
        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)), settings.trace_share)

    def start_request(self, scope: Mapping[str, Any]) -> Span:
        """Start the span of a request, in the trace that its client names if it does."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        parent = parent_of(headers.get("traceparent", ""), headers.get("tracestate", ""))
        context = None if parent is None else trace.set_span_in_context(trace.NonRecordingSpan(parent))
        attributes = {"http.request.method": scope["method"], "twinkle.request": scope.get("request_id") or ""}
        return self._tracer.start_span(scope["method"], context, SpanKind.SERVER, attributes)

    # `ports.Tracer`

    def accepted(self, operation: Operation) -> None:
        """Start the span of an operation, within the request that is being handled."""
        span = self._tracer.start_span(
            f"operation {operation.kind}",
            attributes={
                "twinkle.kind": operation.kind,
                "twinkle.operation": operation.id,
                "twinkle.number": operation.number,
                "twinkle.queue": operation.queue_id,
                "twinkle.tokens": operation.tokens,
            },
        )
        if span.is_recording():
            self._operations[operation.id] = span, time.monotonic()

    def began(self, operations: Collection[int]) -> None:
        """Note that the engine runs these operations."""
        self._began = []
        for operation in sorted(operations):
            if operation not in self._operations:
                continue
            span, since = self._operations[operation]
            self._began.append(span.get_span_context())
            if since:  # the engine reports a pass again after the decode steps in its middle
                self._operations[operation] = span, 0.0
                span.set_attribute("twinkle.queue_seconds", round(time.monotonic() - since, 6))
                span.add_event("began")

    def passed(self, head: Mapping[str, Any]) -> None:
        """Record the span of a pass that has just ended; decode steps of samplers have none."""
        if head.get("kind") == "sample":
            return
        contexts, self._began = self._began, []
        if not contexts:
            return
        end = time.time_ns()
        parent = trace.set_span_in_context(trace.NonRecordingSpan(contexts[0]))
        attributes = {
            f"twinkle.pass.{name}": head[name]
            for name in ("kind", "tokens", "padded", "tenants", "operations", "flops")
            if isinstance(head.get(name), (str, int, float))
        }
        start = end - int(float(head.get("seconds", 0.0)) * _NANOSECONDS)
        links = [Link(context) for context in contexts]
        span = self._tracer.start_span("pass", parent, SpanKind.INTERNAL, attributes, links, start_time=start)
        span.end(end)

    def ended(self, operation: Operation, outcome: str) -> None:
        """End the span of an operation; its error is not recorded, because it may quote the request."""
        span, _ = self._operations.pop(operation.id, (None, 0.0))
        if span is None:
            return
        span.set_attribute("twinkle.outcome", outcome)
        if outcome not in ("done", "cancelled"):
            span.set_status(Status(StatusCode.ERROR, outcome))
        span.end()

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()


class TraceMiddleware:
    """Gives each request a span, and its response the header `traceparent`.

    Args:
        app: the next application.
        traces: records the spans.
    """

    def __init__(self, app: Any, traces: Traces) -> None:
        self._app = app
        self._traces = traces

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one connection."""
        if scope["type"] != "http" or scope["path"].startswith(_QUIET):
            await self._app(scope, receive, send)
            return
        span = self._traces.start_request(scope)
        carrier: dict[str, str] = {}
        self._traces.propagator.inject(carrier, trace.set_span_in_context(span))
        names = [(name.encode(), value.encode()) for name, value in carrier.items()]

        async def observe(message: Any) -> None:
            if message["type"] == "http.response.start":
                span.set_attribute("http.response.status_code", message["status"])
                if message["status"] >= 500:
                    span.set_status(Status(StatusCode.ERROR))
                message = {**message, "headers": [*message.get("headers", ()), *names]}
            await send(message)

        try:
            with trace.use_span(span, record_exception=False):
                await self._app(scope, receive, observe)
        finally:
            route = getattr(scope.get("route"), "path", None) or UNMATCHED
            span.update_name(f"{scope['method']} {route}")
            span.set_attribute("http.route", route)
            span.end()
