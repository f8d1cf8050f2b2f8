"""SIGTERM lets everybody go with an answer, and the next start goes on where this one was."""

import signal
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import pytest

from twinkle_server.serve import last_words
from twinkle_server.wire import tinker_pb2 as wire

from .conftest import Process

PROTOBUF = {"Content-Type": "application/x-protobuf"}
LORA = {"rank": 8, "train_unembed": True, "train_mlp": True, "train_attn": True}


def body(model: str, number: int) -> bytes:
    made = wire.ForwardBackwardRequest(model_id=model, seq_id=number, loss_fn="cross_entropy")
    datum = made.data.add()
    datum.model_input.add().encoded_text.tokens = np.asarray([1, 2, 3], np.int32).tobytes()
    for name, values in (("target_tokens", np.asarray([1, 2, 3], "<i8")), ("weights", np.ones(3, "<f4"))):
        tensor = datum.loss_fn_inputs[name]
        tensor.dtype = wire.DTYPE_INT64 if values.dtype.kind == "i" else wire.DTYPE_FLOAT32
        tensor.shape.append(3)
        tensor.dense = values.tobytes()
    return made.SerializeToString()


def poll(client: httpx.Client, request: str) -> httpx.Response:
    headers = {"Accept": "application/x-protobuf"}
    return client.post("/api/v1/retrieve_future", json={"request_id": request}, headers=headers)


def begin(client: httpx.Client) -> tuple[str, str]:
    """Make a model, and ask for its second operation before its first; return the model and the future."""
    form = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}
    session = client.post("/api/v1/create_session", json=form).json()["session_id"]
    made = {"session_id": session, "model_seq_id": 0, "base_model": "ledger/model", "lora_config": LORA}
    assert client.post("/api/v1/create_model", json=made).status_code == 200
    model = f"{session}:train:0"
    early = client.post("/api/v1/forward_backward", content=body(model, 2), headers=PROTOBUF)
    return model, early.json()["request_id"]


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_who_waits_is_answered_and_is_served_after_the_next_start(tmp_path: Path, number: signal.Signals) -> None:
    process = Process(tmp_path / "data").start()
    answers: list[httpx.Response] = []
    with process.client() as client, process.client() as other:
        model, early = begin(client)
        waiting = threading.Thread(target=lambda: answers.append(poll(other, early)))
        waiting.start()
        time.sleep(0.5)
        assert process.stop(number) == 0
        waiting.join(60)
    assert [answer.status_code for answer in answers] == [200]
    assert answers[0].json()["type"] == "try_again"
    process.start()
    try:
        with process.client(process.key) as client:
            first = client.post("/api/v1/forward_backward", content=body(model, 1), headers=PROTOBUF)
            for request in (first.json()["request_id"], early):
                answer = poll(client, request)
                assert answer.headers["content-type"].startswith("application/x-protobuf"), answer.text
    finally:
        process.stop()


@pytest.mark.full
def test_kill_9_is_forgiven(tmp_path: Path) -> None:
    process = Process(tmp_path / "data").start()
    with process.client() as client:
        model, early = begin(client)
    assert process.stop(signal.SIGKILL) == -signal.SIGKILL
    process.start()
    try:
        with process.client(process.key) as client:
            client.post("/api/v1/forward_backward", content=body(model, 1), headers=PROTOBUF)
            assert poll(client, early).headers["content-type"].startswith("application/x-protobuf")
    finally:
        assert process.stop() == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "ended (x): File 'a', line 1\n    raise E\ntwinkle.errors.ModelLoadError: /m is cut off; fetch it",
            "/m is cut off; fetch it",
        ),
        ("killed by SIGKILL", "killed by SIGKILL"),
        ("the engine ended: out of memory", "the engine ended: out of memory"),
        ("", ""),
    ],
)
def test_an_engine_that_cannot_start_says_why(text: str, said: str) -> None:
    assert last_words(text) == said
