"""Figures add up, tenants are marks, and the number of series is bounded."""

import asyncio
from typing import Any

import structlog
from prometheus_client.parser import text_string_to_metric_families

from twinkle_server.telemetry import metrics as module
from twinkle_server.telemetry.metrics import OTHERS, Metrics, TelemetryMiddleware


def read(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Return samples by name and label values."""
    families = text_string_to_metric_families(metrics.write().decode())
    return {
        (sample.name, *(value for name, value in sorted(sample.labels.items()) if name != "le" or value == "+Inf")): (
            sample.value
        )
        for family in families
        for sample in family.samples
    }


def test_operations_are_counted_by_kind_and_outcome_and_tokens_when_done() -> None:
    metrics = Metrics(b"s")
    metrics.finished("forward", "done", 0.5, 100, "alice")
    metrics.finished("forward", "user", 0.5, 100, "alice")
    metrics.finished("sample", "done", 0.1, 7, "bob")
    found = read(metrics)
    assert found["twinkle_operations_total", "forward", "done"] == 1
    assert found["twinkle_operations_total", "forward", "user"] == 1
    assert found["twinkle_tokens_total", "forward"] == 100
    assert found["twinkle_tenant_tokens_total", metrics.mark("alice")] == 100
    assert found["twinkle_tenant_tokens_total", metrics.mark("bob")] == 7
    assert found["twinkle_operation_seconds_count", "forward"] == 2


def test_a_pass_tells_fill_tenants_and_operations() -> None:
    metrics = Metrics(b"s")
    head = {"kind": "pass", "seconds": 0.2, "tokens": 75, "padded": 25, "tenants": 3, "operations": 5, "flops": 1e6}
    metrics.passed(head)
    metrics.passed({"kind": "barrier", "seconds": 0.2, "tokens": 0, "padded": 0})
    found = read(metrics)
    assert found["twinkle_pass_fill_sum", "pass"] == 0.75
    assert found["twinkle_pass_tenants_sum", "pass"] == 3
    assert found["twinkle_pass_operations_sum", "pass"] == 5
    assert ("twinkle_pass_fill_sum", "barrier") not in found


def test_lives_of_models_and_of_the_engine_are_counted() -> None:
    metrics = Metrics(b"s")
    metrics.restored()
    metrics.detached()
    metrics.replayed(4)
    metrics.restarted("died")
    metrics.snapshotted(1000)
    metrics.watch("age", "x", lambda: 2.5)
    found = read(metrics)
    assert found["twinkle_swaps_total", "in"] == found["twinkle_swaps_total", "out"] == 1
    assert found["twinkle_replays_total",] == 4
    assert found["twinkle_engine_restarts_total", "died"] == 1
    assert found["twinkle_snapshot_bytes_total",] == 1000
    assert found["twinkle_age",] == 2.5


def test_tenants_are_marks_and_only_so_many(monkeypatch) -> None:
    monkeypatch.setattr(module, "_TENANTS", 3)
    metrics = Metrics(b"s")
    for number in range(10):
        metrics.finished("forward", "done", 0.1, 1, f"tenant-{number}")
    text = metrics.write().decode()
    assert "tenant-" not in text
    assert read(metrics)["twinkle_tenant_tokens_total", OTHERS] == 7


def test_requests_are_counted_by_template_and_never_by_what_was_written() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != "/none":
            scope["route"] = type("Route", (), {"path": "/sessions/{id}"})()
        await send({"type": "http.response.start", "status": 404, "headers": []})

    async def send(message: Any) -> None:
        pass

    metrics = Metrics(b"s")
    for method, path in (("GET", "/sessions/secret-id"), ("GET", "/none"), ("BREW", "/none")):
        scope = {"type": "http", "method": method, "path": path, "headers": []}
        asyncio.run(TelemetryMiddleware(app, metrics)(scope, None, send))
    found = read(metrics)
    assert found["twinkle_http_requests_total", "GET", "/sessions/{id}", "404"] == 1
    assert found["twinkle_http_requests_total", "GET", "unmatched", "404"] == 1
    assert found["twinkle_http_requests_total", "other", "unmatched", "404"] == 1
    assert "secret-id" not in metrics.write().decode()


def test_a_service_that_is_not_ready_logs_no_refusal_for_each_probe() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["route"] = type("Route", (), {"path": scope["path"]})()
        await send({"type": "http.response.start", "status": 503, "headers": []})

    async def send(message: Any) -> None:
        pass

    metrics = Metrics(b"s")
    with structlog.testing.capture_logs() as lines:
        for path in ("/readyz", "/api/v1/optim_step"):
            scope = {"type": "http", "method": "GET", "path": path, "headers": []}
            asyncio.run(TelemetryMiddleware(app, metrics)(scope, None, send))
    assert [line["route"] for line in lines] == ["/api/v1/optim_step"]
    assert read(metrics)["twinkle_http_requests_total", "GET", "/readyz", "503"] == 1
