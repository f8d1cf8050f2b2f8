"""Graphs of losses: what is not in the tables is refused before anything could run it."""

import base64
import json
import math
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle_server.wire.loss_graphs import MAX_BYTES, loss_id, read_graph, read_loss_id

INPUTS = [{"name": "logprobs", "rank": 1}, {"name": "weights", "rank": 1}]
START = [{"op": "placeholder", "name": name, "target": name} for name in ("logprobs", "weights")]


def output(loss: str = "total", **metrics: str) -> dict[str, Any]:
    named = {f"custom/{name}:sum": {"ref": node} for name, node in metrics.items()}
    args = [{"tuple": [{"ref": loss}, {"dict": named}]}]
    return {"op": "output", "name": "output", "target": "output", "args": args, "kwargs": {}}


def call(name: str, target: str, *args: Any, op: str = "call_function", **kwargs: Any) -> dict[str, Any]:
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


PRODUCT = call("product", "operator.mul", {"ref": "logprobs"}, {"ref": "weights"})
TOTAL = call("total", "sum", {"ref": "product"}, op="call_method")


def test_a_graph_is_its_id_and_the_other_way_round():
    graph = read_graph(INPUTS, [*START, PRODUCT, TOTAL, output(x="total")])
    assert graph.metrics == {"custom/x:sum": "total"}
    assert [node.operation for node in graph.nodes] == ["mul", "sum"]
    assert read_loss_id(loss_id(graph)) == graph
    assert loss_id(read_loss_id(loss_id(graph))) == loss_id(graph)


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (call("total", "os.system", "x"), "operation 'os.system'"),
        (call("total", "torch.load", "x"), "operation 'torch.load'"),
        (call("total", "torch.zeros", 10**12), "operation 'torch.zeros'"),
        (call("total", "torch.__builtins__.eval", "1"), "unsupported operation"),
        (call("total", "builtins.eval", "1"), "unsupported operation"),
        (call("total", "item", {"ref": "logprobs"}, op="call_method"), "operation 'item'"),
        (call("total", "__reduce__", {"ref": "logprobs"}, op="call_method"), "unsupported"),
        (call("total", "backward", {"ref": "logprobs"}, op="call_method"), "unsupported"),
        (call("total", "add_", {"ref": "logprobs"}, 1, op="call_method"), "unsupported"),
        (call("total", "weight", op="get_attr"), "'get_attr'"),
        (call("total", "layer", op="call_module"), "'call_module'"),
        (call("total", "torch.sum", {"ref": "later"}), "must refer to earlier nodes, got 'later'"),
        (call("total", "torch.sum", {"ref": "logprobs"}, out={"ref": "weights"}), "argument 'out'"),
        (call("total", "torch.sum", {"device": "cuda"}), "unsupported argument"),
        (call("total", "torch.sum", {"float": "1_0"}), "unsupported argument"),
        (call("a b", "torch.sum", {"ref": "logprobs"}), "must have a name"),
        ({"op": "placeholder", "name": "other", "target": "other"}, "undeclared input"),
        (5, "must be an object"),
        (call("total", "torch.sum", json.loads("[" * 50 + "]" * 50)), "nested at most 8 levels"),
        (call("total", "torch.sum", {"tuple": [{"tuple": [{"tuple": [[[[[[1]]]]]]}]}]}), "nested at most 8 levels"),
        (call("total", "torch.getitem", {"ref": "logprobs"}, {"slice": [1, 2, 3, 4]}), "unsupported argument"),
        (call("total", "torch.sum", math.nan), 'write {"float": "nan"}'),
    ],
)
def test_what_a_loss_may_not_do_is_refused_by_name(node: Any, words: str):
    with pytest.raises(ValueError, match=words):
        read_graph(INPUTS, [*START, node, output()])


@pytest.mark.parametrize(
    ("inputs", "nodes", "words"),
    [
        ([], [output()], "'logprobs' is the first"),
        ([{"name": "x", "rank": 1}], [output()], "'logprobs' is the first"),
        ([{"name": "logprobs", "rank": 3}], [output()], "rank of 0, 1 or 2"),
        (None, [output()], "'logprobs' is the first"),
        (INPUTS, [], "1 to 1024 nodes"),
        (INPUTS, [*START, PRODUCT], "must have an output"),
        (INPUTS, [*START, output("product")], "earlier nodes"),
        (INPUTS, [*START, output("logprobs", x="none")], "earlier nodes"),
        (INPUTS, [*START, {**output("logprobs"), "args": [5]}], "must return"),
        (INPUTS, [*START, output("logprobs"), PRODUCT], "after its output"),
    ],
)
def test_a_graph_that_is_none_is_refused(inputs: Any, nodes: Any, words: str):
    with pytest.raises(ValueError, match=words):
        read_graph(inputs, nodes)


def test_metrics_are_named_as_they_add_up():
    odd = output("logprobs")
    odd["args"][0]["tuple"][1]["dict"] = {"loss:sum": {"ref": "logprobs"}}
    with pytest.raises(ValueError, match=r"a metric must be named custom/.*got 'loss:sum'"):
        read_graph(INPUTS, [*START, odd])


def test_a_graph_that_is_too_large_has_no_id():
    nodes = [call(f"n{place}", "operator.add", {"ref": "logprobs"}, "x" * 100) for place in range(1000)]
    with pytest.raises(ValueError, match=str(MAX_BYTES)):
        loss_id(read_graph(INPUTS, [*START, *nodes, output("n999")]))


def test_a_packed_bomb_is_unpacked_no_further_than_a_graph_may_be():
    import base64
    import zlib

    bomb = "loss." + base64.urlsafe_b64encode(zlib.compress(b"[" * 50_000_000)).decode()
    with pytest.raises(ValueError, match="loss_id must be one"):
        read_loss_id(bomb)


@given(st.text(max_size=40) | st.text("abcdefABCDEF0123456789-_", max_size=60).map("loss.".__add__))
@settings(max_examples=200)
def test_any_text_is_an_id_or_refused(text: str):
    with pytest.raises(ValueError, match="loss_id must be one"):
        read_loss_id(text)


def test_an_integer_that_json_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="cannot encode the graph as JSON"):
        loss_id(read_graph(INPUTS, [*START, call("total", "torch.sum", 2**70), output()]))


@pytest.mark.parametrize("depth", [60, 1000, 20_000])
def test_an_id_that_is_nested_deeply_is_refused(depth: int):
    nodes = [["total", "sum", json.loads("[" * min(depth, 900) + "]" * min(depth, 900)), {}]]
    said = json.dumps({"inputs": [["logprobs", 1]], "nodes": nodes, "loss": "total", "metrics": {}})
    data = said if depth < 1000 else said.replace("[[", "[" * depth, 1)
    packed = base64.urlsafe_b64encode(zlib.compress(data.encode())).decode().rstrip("=")
    with pytest.raises(ValueError, match=r"must be nested at most 8 levels|loss_id must be one"):
        read_loss_id("loss." + packed)
