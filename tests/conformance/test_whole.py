"""Lines 113 and 114: older clients, and many at once; the cookbook's lines are in a file of their own."""

import threading
import time
from typing import Any

import numpy as np
from server_raw import Raw, tokens_of
from serving import Served

TOKENS = [5, 9, 4, 8, 2]


def test_line_113_a_client_that_speaks_json_only_is_served(raw: Raw) -> None:
    """As SDK 0.16: no configuration, chunks without a type, results in JSON, `/forward`, `/unload_model`."""
    model = raw.model()
    data = [{
        "model_input": {"chunks": [{"tokens": TOKENS[:-1]}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": TOKENS[1:], "dtype": "int64", "shape": [4]},
            "weights": {"data": [1.0] * 4, "dtype": "float32", "shape": [4]},
        },
    }]  # fmt: skip
    given = {"data": data, "loss_fn": "cross_entropy"}

    def result(path: str, field: str) -> dict[str, Any]:
        request = raw.post(path, {"model_id": model.id, "seq_id": model.next(), field: given})["request_id"]
        found: dict[str, Any] = raw.result(request)
        return found

    forward, backward = result("/forward", "forward_input"), result("/forward_backward", "forward_backward_input")
    step = raw.post("/optim_step", {"model_id": model.id, "seq_id": model.next(), "adam_params": {}})["request_id"]
    assert raw.result(step) is not None
    logprobs = forward["loss_fn_outputs"][0]["logprobs"]
    assert (logprobs["dtype"], logprobs["shape"]) == ("float32", [4])
    assert backward["loss_fn_outputs"][0]["logprobs"]["data"] == logprobs["data"]
    assert np.isclose(backward["metrics"]["loss:sum"], -sum(logprobs["data"]), rtol=1e-5)
    sampler = raw.sampler()
    body = {
        "num_samples": 1, "prompt": {"chunks": [{"tokens": TOKENS}]}, "sampling_params": {"max_tokens": 3},
        "sampling_session_id": sampler.id, "seq_id": 0,
    }  # fmt: skip
    sample = raw.result(raw.post("/asample", body)["request_id"])
    assert sample["sequences"][0]["stop_reason"] in ("stop", "length")
    assert 1 <= len(sample["sequences"][0]["tokens"]) == len(sample["sequences"][0]["logprobs"]) <= 3
    unloaded = raw.result(raw.post("/unload_model", {"model_id": model.id, "type": "unload_model"})["request_id"])
    assert unloaded["model_id"] == model.id
    late = raw.send("/optim_step", {"model_id": model.id, "seq_id": model.next() + 1, "adam_params": {}})
    assert late.status_code == 410
    assert "unloaded" in late.json()["detail"]


def test_line_114_many_samples_and_a_training_loop_share_the_service(served: Served) -> None:
    with Raw(served.url) as raw, Raw(served.url) as other:
        sampler, model = raw.sampler(), other.model()
        params = {"max_tokens": 16, "stop": [], "temperature": 1.0}
        promises = [sampler.submit(TOKENS, params=params)["request_id"] for _ in range(64)]
        steps: list[float] = []

        def train() -> None:
            for _ in range(5):
                start = time.monotonic()
                model.train(TOKENS * 4)
                steps.append(time.monotonic() - start)

        loop = threading.Thread(target=train)
        loop.start()
        answers = [raw.result(request, "sample") for request in promises]
        loop.join(120)
        assert len(steps) == 5, "training starved"
        assert all(len(tokens_of(answer.sequences[0])) == 16 for answer in answers)
