"""Traces: requests, their operations and fused passes, without contents; received by a collector over HTTP."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from server_raw import Failed, Raw, row
from serving import ledger
from starlette.testclient import TestClient

from twinkle.errors import TwinkleError
from twinkle_server.operations import Operation
from twinkle_server.serve import open_traces
from twinkle_server.settings import Settings
from twinkle_server.telemetry.traces import TraceMiddleware, Traces, parent_of

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Received:
    """Traces whose spans stay in memory."""

    def __init__(self, share: float | None = None) -> None:
        self.exporter = InMemorySpanExporter()
        self.traces = Traces(SimpleSpanProcessor(self.exporter), share)

    def named(self, name: str) -> list[Any]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]


def operation(number: int, kind: str = "forward_backward") -> Operation:
    return Operation(number, f"r{number}", "ana", "s:train:0", number, kind, 128)  # type: ignore[arg-type]


def test_a_fused_pass_is_linked_with_all_its_operations() -> None:
    received = Received()
    traces, operations = received.traces, [operation(number) for number in (1, 2, 3)]
    for entry in operations:
        traces.accepted(entry)
    traces.began([1, 2])
    traces.passed({"kind": "sample", "seconds": 0.1})  # decode steps in the middle of the pass
    traces.began([1, 2])
    for entry in operations[:2]:
        traces.ended(entry, "done")
    traces.passed({"kind": "pass", "seconds": 0.25, "tokens": 256, "tenants": 2, "operations": 2, "flops": 1.5})
    traces.ended(operations[2], "server")
    spans = {span.attributes["twinkle.operation"]: span for span in received.named("operation forward_backward")}
    [fused] = received.named("pass")
    assert [link.context.span_id for link in fused.links] == [spans[number].context.span_id for number in (1, 2)]
    assert fused.parent.span_id == spans[1].context.span_id
    assert (fused.end_time - fused.start_time) / 1e9 == pytest.approx(0.25)
    assert fused.attributes["twinkle.pass.tokens"] == 256
    assert [event.name for event in spans[1].events] == ["began"]
    assert spans[1].attributes["twinkle.queue_seconds"] >= 0
    assert "twinkle.queue_seconds" not in spans[3].attributes, "the engine never began it"
    assert spans[3].status.status_code is StatusCode.ERROR
    assert traces._operations == {}


@pytest.fixture
def asked() -> Iterator[tuple[TestClient, Received]]:
    received = Received()
    app = FastAPI()

    @app.get("/runs/{run}")
    def run(run: str) -> dict[str, str]:
        received.traces.accepted(operation(1))
        received.traces.ended(operation(1), "done")
        return {}

    app.add_middleware(TraceMiddleware, traces=received.traces)
    with TestClient(app) as client:
        yield client, received


def test_a_request_continues_the_trace_of_its_client(asked: tuple[TestClient, Received]) -> None:
    client, received = asked
    answer = client.get("/runs/secret-name", headers={"traceparent": PARENT})
    [request], [worked] = received.named("GET /runs/{run}"), received.named("operation forward_backward")
    _, trace, parent, _ = PARENT.split("-")
    assert (f"{request.context.trace_id:032x}", f"{request.parent.span_id:016x}") == (trace, parent)
    assert answer.headers["traceparent"] == f"00-{trace}-{request.context.span_id:016x}-01"
    assert (worked.parent.span_id, worked.context.trace_id) == (request.context.span_id, request.context.trace_id)
    assert request.attributes["http.response.status_code"] == 200
    assert "secret-name" not in str([span.to_json() for span in received.exporter.get_finished_spans()])


def test_probes_and_requests_that_their_client_does_not_sample_have_no_span(
    asked: tuple[TestClient, Received],
) -> None:
    client, received = asked
    client.get("/healthz")
    client.get("/runs/a", headers={"traceparent": PARENT[:-1] + "0"})
    client.get("/runs/a", headers={"traceparent": "nonsense"})
    assert len(received.named("GET /runs/{run}")) == 1


@pytest.mark.parametrize(
    "header",
    [
        PARENT, PARENT[:-1] + "0", "", "00", PARENT.upper(), PARENT + "-more", "01" + PARENT[2:] + "-more",
        "ff" + PARENT[2:],
        f"00-{'0' * 32}-b7ad6b7169203331-01", f"00-{'a' * 32}-{'0' * 16}-01", PARENT.replace("-", "_"),
    ],
)  # fmt: skip
def test_headers_are_read_as_the_sdk_reads_them(header: str) -> None:
    context = TraceContextTextMapPropagator().extract({"traceparent": header})
    expected = trace.get_current_span(context).get_span_context()
    found = parent_of(header)
    assert (found is not None) == expected.is_valid
    if found is not None:
        assert (found.trace_id, found.span_id, found.trace_flags) == (
            expected.trace_id, expected.span_id, expected.trace_flags,
        )  # fmt: skip


def test_a_share_of_zero_records_only_what_clients_sample() -> None:
    received = Received(share=0.0)
    received.traces.start_request({"method": "GET", "headers": []}).end()
    received.traces.start_request({"method": "GET", "headers": [(b"traceparent", PARENT.encode())]}).end()
    assert len(received.named("GET")) == 1
    received.traces.accepted(operation(1))
    assert received.traces._operations == {}


def test_nothing_is_imported_unless_a_collector_is_configured(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, twinkle_server.application;"
        "from twinkle_server.serve import open_traces; from twinkle_server.settings import Settings;"
        "assert open_traces(Settings('m', pathlib.Path('d'))) is None;"
        "print([name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter',"
        " 'jinja2', 'tokenizers', 'twinkle_server.telemetry.traces'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={})
    assert done.stdout.strip() == "[]", done.stderr


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(TwinkleError, match=r"pip install 'twinkle-server\[otel\]'"):
        open_traces(Settings("m", Path("d"), otlp_endpoint="http://127.0.0.1:1"))


class Collector:
    """Receives traces over HTTP."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                collector.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *arguments: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def spans(self) -> list[Any]:
        found = []
        for body in list(self.bodies):
            message = ExportTraceServiceRequest.FromString(body)
            found += [span for one in message.resource_spans for scope in one.scope_spans for span in scope.spans]
        return found


def test_a_collector_receives_the_spans_of_a_service(tmp_path: Path) -> None:
    collector = Collector()
    service = ledger(tmp_path / "data", {"otlp_endpoint": collector.url}, OTEL_BSP_SCHEDULE_DELAY="200")
    try:
        service.start()
        with Raw(service.url) as raw:
            model = raw.model(user_metadata={"note": "a text of the tenant"})
            raw.http.headers["traceparent"] = PARENT
            asked = model.submit_pass([row([7001, 7002, 7003])])
            raw.result(asked, "pass")
            with pytest.raises(Failed):
                model.forward([row([1, 2])], "a_loss_of_the_tenant")
        assert httpx.get(f"{service.url}/healthz", trust_env=False).status_code == 200
        end = time.monotonic() + 30
        while not any(span.name == "pass" for span in collector.spans()) and time.monotonic() < end:
            time.sleep(0.1)
    finally:
        service.stop()
    spans = collector.spans()
    collector.server.shutdown()
    collector.server.server_close()
    names = {span.name for span in spans}
    assert {"POST /api/v1/forward_backward", "operation forward_backward", "operation create", "pass"} <= names
    trace = bytes.fromhex(PARENT.split("-")[1])
    mine = [span for span in spans if span.trace_id == trace]
    requests = {span.span_id for span in mine if span.name == "POST /api/v1/forward_backward"}
    [trained] = [span for span in mine if span.name == "operation forward_backward"]
    [fused] = [span for span in mine if span.name == "pass" and span.links[0].span_id == trained.span_id]
    assert trained.parent_span_id in requests
    assert fused.parent_span_id == trained.span_id
    everything = b"".join(collector.bodies)
    for secret in (b"a text of the tenant", b"a_loss_of_the_tenant", b"tml-", b"target_tokens"):
        assert secret not in everything
