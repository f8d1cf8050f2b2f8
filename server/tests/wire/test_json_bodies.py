"""What older clients say in JSON becomes the very bytes that newer clients send, and results read the same."""

import base64
from typing import Any

import numpy as np
import orjson
import pytest

from twinkle_server.wire import tinker_pb2 as pb
from twinkle_server.wire.codec import (
    SampledPrompt,
    SampledText,
    TopK,
    datum_inputs,
    datum_tokens,
    forward_backward_output,
    loss_config,
    parse_request,
    sample_response,
)
from twinkle_server.wire.json_bodies import pass_json, pass_message, sample_json


def f4(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


WORK: dict[str, Any] = {
    "data": [
        {
            "model_input": {"chunks": [{"tokens": [1, 2, 3]}]},
            "loss_fn_inputs": {
                "target_tokens": {"data": [2, 3, 4], "dtype": "int64", "shape": [3]},
                "weights": {"data": [0, 1.0, 1], "dtype": "float32", "shape": [3]},
            },
        }
    ],
    "loss_fn": "cross_entropy",
}
HEAD = {"model_id": "m", "seq_id": 1}


def row(**fields: Any) -> dict[str, Any]:
    return {"data": [{**WORK["data"][0], **fields}], "loss_fn": "cross_entropy"}


def test_an_older_body_becomes_the_golden_request(golden_request: bytes):
    made = pass_message(HEAD, WORK, forward_only=False).SerializeToString(deterministic=True)
    assert parse_request(made) == parse_request(golden_request)


def test_options_of_the_loss_keep_numbers_and_texts():
    message = pass_message(HEAD, {**WORK, "loss_fn_config": {"beta": 1, "how": "x"}}, forward_only=True)
    assert (loss_config(message), message.forward_only) == ({"beta": 1.0, "how": "x"}, True)


def test_sparse_inputs_and_images_are_carried_over():
    sparse = {"data": [5], "dtype": "int64", "shape": [1, 3], "sparse_crow_indices": [0, 1], "sparse_col_indices": [2]}
    chunks = [{"tokens": []}, {"data": base64.b64encode(b"ab").decode(), "format": "png", "expected_tokens": 4}]
    [datum] = pass_message(
        HEAD, row(model_input={"chunks": chunks}, loss_fn_inputs={"target_tokens": sparse}), forward_only=False
    ).data
    assert datum_inputs(datum)["target_tokens"].tolist() == [[0, 0, 5]]
    assert (datum.model_input[1].image.data, datum.model_input[1].image.expected_tokens) == (b"ab", 4)


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (None, "must be an object, got absent"),
        ([], "must be an object, got a list"),
        ({**WORK, "loss_fn": 3}, "loss_fn must be a string, got a int"),
        ({**WORK, "data": {}}, "data must be a list, got a dict"),
        ({**WORK, "loss_fn_config": {"a": None}}, r"loss_fn_config\.a must be .* got absent"),
        (
            row(model_input={"chunks": [{"tokens": [2**31]}]}),
            r"data\[0\]: chunks\[0\]: the numbers of tokens must be between",
        ),
        (row(model_input={"chunks": [{"tokens": [2**70]}]}), "a flat list of 64-bit integers"),
        (row(loss_fn_inputs={"weights": {"data": [1e308], "dtype": "float32"}}), "in the range of float32"),
        (row(model_input={"chunks": [{"tokens": [1.5]}]}), "a flat list of 64-bit integers"),
        (row(model_input={"chunks": [{"tokens": [[1]]}]}), "a flat list of"),
        (row(model_input={"chunks": [{"tokens": "abc"}]}), "tokens must be a list, got a str"),
        (row(model_input={"chunks": [{"location": "x", "type": "image_asset_pointer"}]}), "image_asset_pointer"),
        (row(model_input={"chunks": [{"dmel": "%%%"}]}), "must be base64"),
        (row(model_input=None), "model input must be .*got absent"),
        (row(loss_fn_inputs={"weights": {"data": [1], "dtype": "int8"}}), "got 'int8'"),
        (row(loss_fn_inputs={"weights": {"data": [1], "dtype": []}}), "dtype"),
        (row(loss_fn_inputs={"weights": {"data": ["1"], "dtype": "float32"}}), "a flat list of numbers"),
        (
            row(loss_fn_inputs={"weights": {"data": [1], "sparse_crow_indices": [0, 1], "shape": [1, 1]}}),
            "column indices",
        ),
    ],
)
def test_a_body_of_another_form_is_refused_where_it_is_wrong(work: Any, words: str):
    with pytest.raises(ValueError, match=words):
        pass_message(HEAD, work, forward_only=False)


def test_a_list_of_two_lengths_is_refused():
    with pytest.raises(ValueError, match="weights must be a flat list of numbers"):
        pass_message(HEAD, row(loss_fn_inputs={"weights": {"data": [[1], [1, 2]]}}), forward_only=False)


def test_results_of_passes_read_as_older_clients_expect():
    body = orjson.loads(pass_json(forward_backward_output([{"logprobs": f4(-1, -2)}], {"loss:sum": 3.0})))
    assert body["loss_fn_outputs"] == [{"logprobs": {"data": [-1.0, -2.0], "dtype": "float32", "shape": [2]}}]
    assert body["metrics"] == {"loss:sum": 3.0}


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_json_cannot_say_is_an_error_and_no_null(value: float):
    with pytest.raises(ValueError, match="not finite"):
        pass_json(forward_backward_output([{"logprobs": f4(value)}], {}))
    with pytest.raises(ValueError, match="loss:sum is not finite"):
        pass_json(forward_backward_output([], {"loss:sum": value}))


def test_results_of_samples_read_as_older_clients_expect():
    topk = TopK(np.array([[0], [4]], np.int32), f4(-99999, -0.5).reshape(2, 1))
    text = SampledText(np.array([5], np.int32), f4(-0.5), "stop")
    body = orjson.loads(sample_json(sample_response([text], SampledPrompt(f4(np.nan, -1), topk))))
    assert body["sequences"] == [{"stop_reason": "stop", "tokens": [5], "logprobs": [-0.5]}]
    assert body["prompt_logprobs"] == [None, -1.0]
    assert body["topk_prompt_logprobs"] == [None, [[4, -0.5]]]


def test_an_empty_message_is_a_message():
    assert parse_request(b"") == pb.ForwardBackwardRequest()
    assert datum_tokens(pb.Datum()).tolist() == []
