"""`RouterSampler`: what is unsure is asked elsewhere, and nothing else."""

import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from twinkle.data_format import SampledSequence, SampleResponse, SamplingParams
from twinkle.errors import ArgumentError
from twinkle_agentic.sampler import RouterSampler
from twinkle_agentic.sampler.router_sampler import mean_entropy

pytest.importorskip("httpx")
SURE = [[(7, math.log(0.98)), (8, math.log(0.01))]]
UNSURE = [[(7, math.log(0.25)), (8, math.log(0.25)), (9, math.log(0.25)), (1, math.log(0.25))]]
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "q"}]}


class Fixed:
    """A sampler with fixed log-probabilities."""

    template = "its template"

    def __init__(self, *logprobs: Any) -> None:
        self.logprobs, self.calls = logprobs, []  # type: ignore[var-annotated]

    def sample(self, inputs: Any, sampling_params: SamplingParams, adapter_name: Any, **kwargs: Any) -> Any:
        self.calls.append((sampling_params, adapter_name, kwargs))
        return [SampleResponse([SampledSequence("stop", [7], logprobs, "own")]) for logprobs in self.logprobs]


@pytest.fixture
def service() -> Iterator[Any]:
    requests: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append((self.path, self.headers["Authorization"], body))
            answer = {"choices": [{"message": {"role": "assistant", "content": "theirs"}, "finish_reason": "stop"}]}
            data = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    server.requests = requests  # type: ignore[attr-defined]
    yield server
    server.shutdown()
    thread.join(10)
    server.server_close()


def test_entropy_is_that_of_the_renormalized_candidates() -> None:
    assert mean_entropy(UNSURE) == pytest.approx(math.log(4))
    p = 0.98 / 0.99
    assert mean_entropy(SURE) == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p))
    assert mean_entropy(SURE + UNSURE) == pytest.approx((mean_entropy(SURE) + mean_entropy(UNSURE)) / 2)


@pytest.mark.parametrize(("method", "threshold"), [("entropy", 1.0), ("logp", -1.0)])
def test_unsure_sequences_are_replaced(service: Any, method: Any, threshold: float) -> None:
    address = f"http://127.0.0.1:{service.server_port}"
    inner = Fixed(SURE, UNSURE, None)
    router = RouterSampler(inner, address, "big", "key", method, threshold)
    found = router.sample([ASKED] * 3, {"temperature": 0.5}, "mine", adapter_path="p")
    assert [response.sequences[0].decoded for response in found] == ["own", "theirs", "theirs"]
    assert found[1].sequences[0].tokens == []
    [(params, adapter, options)] = inner.calls
    assert (params.logprobs, params.temperature, adapter, options) == (10, 0.5, "mine", {"adapter_path": "p"})
    path, key, body = service.requests[0]
    assert (path, key) == ("/v1/chat/completions", "Bearer key")
    assert (body["model"], body["temperature"], body["messages"]) == ("big", 0.7, ASKED["messages"])
    assert router.template == "its template"


def test_encoded_rows_are_never_sent(service: Any) -> None:
    router = RouterSampler(Fixed(UNSURE), f"http://127.0.0.1:{service.server_port}/v1/")
    assert router.sample([{"input_ids": [1], **ASKED}])[0].sequences[0].decoded == "own"
    assert service.requests == []


def test_without_an_answer_the_own_sequence_stays(caplog: pytest.LogCaptureFixture) -> None:
    router = RouterSampler(Fixed(UNSURE), "http://127.0.0.1:9", threshold=0.1)
    router._service._options["max_retries"] = 0
    assert router.sample([ASKED])[0].sequences[0].decoded == "own"
    assert "RouterSampler keeps a sequence of low confidence" in caplog.text


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ArgumentError, match="method must be 'entropy' or 'logp', got 'max'"):
        RouterSampler(Fixed(), "http://x", method="max")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="top_k_logprobs must be at least 1, got 0"):
        RouterSampler(Fixed(), "http://x", top_k_logprobs=0)
