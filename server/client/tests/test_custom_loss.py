"""`forward_backward_custom` when answers are lost, and the patterns that a request may have."""

from typing import Any

import httpx
import numpy as np
import pytest
from pydantic import ValidationError

from twinkle.errors import ArgumentError
from twinkle_client import MultiLoraTransformersModel, errors, wire
from twinkle_client.calls import Call
from twinkle_client.http import Connection
from twinkle_client.model import _Adapter
from twinkle_client.queues import AdapterQueue
from twinkle_client.types.models import AdapterConfig

ROW = {"input_ids": [1, 2, 3], "labels": [[4, 5], [6, 7], [-100, -100]]}
LOGPS = np.array([[-1.0, -2.0], [-3.0, -4.0], [0.0, 0.0]], np.float32)


class Service:
    """Answers both passes; the answers to some numbers are lost after the call was carried out."""

    def __init__(self, *lost: int) -> None:
        self.lost, self.done, self.trained, self.calls = set(lost), dict[int, bytes](), list[Any](), list[str]()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        number, method = int(request.url.params["seq_id"]), request.url.path.rpartition("/")[2]
        self.calls.append(f"{method} {number}")
        if number not in self.done:
            body = wire.unpack(request.content)
            if method == "forward_backward":
                self.trained.append(body)
            loss = body.get("given_loss", {"value": 0.0, "denominator": 1.0})
            value = {"logps": [LOGPS]} if method == "forward_only" else {"loss": loss["value"], "num_tokens": 1.0}
            self.done[number] = wire.pack({"value": value})
        elif method == "skip":
            return httpx.Response(409, json={"detail": "it has a request"})
        if number in self.lost:
            self.lost.discard(number)
            raise httpx.ReadError("reset")
        return httpx.Response(200, content=self.done[number], headers={"content-type": wire.CONTENT_TYPE})


class Client:
    """What the model needs of a client."""

    def __init__(self, service: Service) -> None:
        transport = httpx.MockTransport(service)
        self.connection = Connection("http://s:1", "tml-k", transport=transport, retry_seconds=0.0)

    def run(self, call: Call[Any]) -> Any:
        return self.connection.run(call)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinkle_client.http.time.sleep", lambda seconds: None)


def model_of(service: Service) -> MultiLoraTransformersModel:
    client: Any = Client(service)
    model = MultiLoraTransformersModel(client=client)
    model._adapters["a"] = _Adapter("a", "m", AdapterQueue(client.connection, "/models/m"))
    model.adapter_name = "a"
    return model


def squares(_rows: Any, logps: Any) -> Any:
    return logps[0].square().sum(), {"one": 1.0}


def test_the_gradient_is_sent_as_the_weights_of_the_labels() -> None:
    service = Service()
    row = {**ROW, "loss_scale": [9.0, 9.0, 9.0]}
    output = model_of(service).forward_backward_custom(row, squares)
    [body] = service.trained
    np.testing.assert_array_equal(body["inputs"][0]["loss_scale"], 2 * LOGPS)
    assert body["given_loss"] == {"value": 30.0, "denominator": 1.0}
    assert (output["loss"], output["metrics"]) == (30.0, {"one": 1.0})
    assert service.calls == ["forward_only 1", "forward_backward 2"]


@pytest.mark.parametrize("lost", [1, 2])
def test_a_call_that_is_made_again_after_a_lost_answer_trains_once(lost: int) -> None:
    service = Service(lost)
    model = model_of(service)
    with pytest.raises(errors.ConnectionFailed):
        model.forward_backward_custom(ROW, squares)
    output = model.forward_backward_custom(ROW, squares)
    assert (output["loss"], output["metrics"]) == (30.0, {"one": 1.0})
    np.testing.assert_array_equal(output["logps"][0], LOGPS)
    assert len(service.trained) == 1
    model.forward_backward_custom(ROW, squares)  # a new call trains again
    assert len(service.trained) == 2


def test_other_rows_after_a_lost_answer_are_a_new_call() -> None:
    service = Service(2)
    model = model_of(service)
    with pytest.raises(errors.ConnectionFailed):
        model.forward_backward_custom(ROW, squares)
    other = {**ROW, "input_ids": [3, 2, 1]}
    model.forward_backward_custom(other, squares)
    assert service.calls[2:] == ["skip 2", "forward_only 3", "forward_backward 4"]
    assert [body["inputs"][0]["input_ids"] for body in service.trained] == [[1, 2, 3], [3, 2, 1]]


def test_no_other_call_comes_between_the_passes() -> None:
    model = model_of(Service())

    def loss(_rows: Any, logps: Any) -> Any:
        for call in (model.clip_grad_and_step, lambda: model.forward_backward_custom(ROW, squares)):
            with pytest.raises(ArgumentError, match="forward_backward_custom of this adapter has not ended"):
                call()
        return logps[0].sum()

    model.forward_backward_custom(ROW, loss)
    model.clip_grad_and_step()

    def fails(_rows: Any, logps: Any) -> Any:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        model.forward_backward_custom(ROW, fails)
    model.clip_grad_and_step()  # the queue is free again


GOOD = (
    "q_proj",
    r".*\.1\.mlp\.down_proj",
    "^model.layers.(0|1).x",
    r"layers\.\d+\.v",
    "layers.[0-3].mlp",
    r"a\.[0-9]+\.b",
)
BAD = ("(a+)+", ".*.*", "(.*)*x", "(a|b)+", "a{99}", "", "(?=x)", r"\w+", "a$", "x" * 257, r"\d+.*", "a\n", "[a-z]")


def test_patterns_of_a_request_cannot_be_slow() -> None:
    config = AdapterConfig(rank_pattern=dict.fromkeys(GOOD, 2), alpha_pattern=dict.fromkeys(GOOD, 0.5))
    assert tuple(config.rank_pattern) == GOOD
    for key in BAD:
        for field in ("rank_pattern", "alpha_pattern"):
            with pytest.raises(ValidationError):
                AdapterConfig(**{field: {key: 2}})
    for value in (0, 1025, 1.5, "x"):
        with pytest.raises(ValidationError):
            AdapterConfig(rank_pattern={"q": value})
    with pytest.raises(ValidationError):
        AdapterConfig(rank_pattern={f"a{n}": 1 for n in range(513)})
