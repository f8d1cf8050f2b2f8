"""Losses that a client traced: their values and gradients are those of the function, and nothing else runs."""

import base64
import hashlib
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from server_pool import answer, datum, drawn, request
from torch.nn import functional

from twinkle_server.engine.errors import UserError, is_passing
from twinkle_server.engine.executor import Pass
from twinkle_server.engine.losses import custom as graphs
from twinkle_server.wire import codec
from twinkle_server.wire.loss_graphs import LossGraph, loss_id, read_graph, read_loss_id


def clipped(logprobs: Any, old: Any, advantages: Any) -> Any:
    ratio = torch.exp(logprobs - old)
    terms = torch.minimum(ratio * advantages, torch.clamp(ratio, 0.8, 1.2) * advantages)
    return -terms.sum(), {"custom/ratio:mean": ratio.mean(), "custom/terms:sum": terms.sum()}


def varied(logprobs: Any, old: Any, advantages: Any) -> Any:
    positive = (advantages > 0) & (old < 0)
    chosen = torch.where(positive, logprobs, torch.zeros_like(logprobs))
    loss = chosen.sum() / logprobs.shape[0] + functional.softplus(-logprobs).mean() * 0.1
    loss = loss - functional.logsigmoid(logprobs[1:]).sum() + (logprobs**2).sum().sqrt() + logprobs.cumsum(0)[-1]
    loss = loss + (1 - logprobs).abs().clamp(min=0.1, max=9.0).sum() + torch.logsumexp(logprobs, dim=0)
    loss = loss + torch.stack([logprobs.max(), logprobs.detach().min()]).sum() + 2.0 ** logprobs.mean()
    loss = loss + functional.mse_loss(logprobs, old) + logprobs.unsqueeze(0).softmax(-1).log().sum()
    return loss + logprobs[positive].sum() / logprobs.numel(), {"custom/n:sum": positive.float().sum()}


def traced(function: Any, **ranks: int) -> LossGraph:
    loss = pytest.importorskip("tinker.lib.public_interfaces.custom_loss")
    handle = loss.trace_loss(function, ranks, "session")
    nodes = [node.model_dump() for node in loss.encode_graph(handle).nodes]
    return read_loss_id(loss_id(read_graph([one.model_dump() for one in handle.inputs], nodes)))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_equal_graphs_have_equal_digests():
    first, again = (graphs.CustomLoss(traced(clipped, logprobs=1, old=1, advantages=1)) for _ in range(2))
    other = graphs.CustomLoss(traced(varied, logprobs=1, old=1, advantages=1))
    assert first.code == again.code
    assert first.code["sha256"] == hashlib.sha256(unpacked(loss_id(first.graph))).hexdigest()
    assert other.code["sha256"] != first.code["sha256"]


def unpacked(text: str) -> bytes:
    """Return the JSON in the id of a loss, as a client reads it."""
    return zlib.decompress(base64.urlsafe_b64decode(text.rpartition(".")[2] + "==="))


@pytest.mark.parametrize("function", [clipped, varied])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_value_gradient_and_metrics_are_those_of_the_function(function: Any):
    graph = traced(function, logprobs=1, old=1, advantages=1)
    old, advantages = torch.randn(7).abs().neg(), torch.randn(7)
    ours = torch.randn(7).abs().neg().requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    loss, metrics = graphs.run(graph, {"logprobs": ours, "old": old, "advantages": advantages})
    wanted, said = function(theirs, old, advantages)
    loss.backward()
    wanted.backward()
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert metrics == pytest.approx({name: float(value.detach()) for name, value in said.items()})


def graph_of(*steps: tuple[str, list[Any]], **kwargs: Any) -> LossGraph:
    nodes: list[dict[str, Any]] = [{"op": "placeholder", "name": "logprobs", "target": "logprobs"}]
    for place, (target, args) in enumerate(steps):
        nodes.append({"op": "call_function", "name": f"n{place}", "target": target, "args": args, "kwargs": kwargs})
    last = {"tuple": [{"ref": nodes[-1]["name"]}, {"dict": {}}]}
    nodes.append({"op": "output", "name": "output", "target": "output", "args": [last]})
    return read_graph([{"name": "logprobs", "rank": 1}], nodes)


X = {"ref": "logprobs"}


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([("torch.sum", [X, {"ref": "logprobs"}])], "torch.sum|sum"),
        ([("torch.exp", [X])], "floating-point scalar"),
        ([("torch.exp", [1.0])], "at least one argument must be a tensor"),
        ([("operator.pow", [10, 10**9])], "at least one argument must be a tensor"),
        ([("operator.getitem", [X, 10**6])], "index"),
        ([("getattr", [X, "grad_fn"])], "shape and ndim"),
        ([("getattr", [X, "__class__"])], "shape and ndim"),
        ([("torch.nn.functional.mse_loss", [X, X, "x"])], "mse_loss"),
        ([("torch.unsqueeze", [X, 1]), ("operator.mul", [{"ref": "n0"}, X])], "exceeds the limit"),
        ([("torch.stack", [[X] * 9000])], "exceeds the limit"),
        ([("operator.gt", [X, 0]), ("torch.any", [{"ref": "n0"}])], "floating-point scalar"),
    ],
)
def test_a_step_that_cannot_be_done_is_the_users_fault(steps: list[Any], words: str):
    with pytest.raises(UserError, match=words):
        graphs.run(graph_of(*steps), {"logprobs": torch.zeros(6000)})


def test_steps_count_together():
    steps: list[tuple[str, list[Any]]] = [("torch.unsqueeze", [X, 1]), ("torch.unsqueeze", [X, 0])]
    steps += [("operator.mul", [{"ref": "n0"}, {"ref": "n1"}])] * 40
    graph = graph_of(*steps)
    with pytest.raises(UserError, match="exceeds the limit"):
        graphs.run(graph, {"logprobs": torch.zeros(1000)})


def likelihood(logprobs: Any, weights: Any) -> Any:
    return -(logprobs * weights).sum(), {"custom/mean:mean": logprobs.mean(), "custom/rows:sum": weights.sum() * 0 + 1}


def sampled(logprobs: Any, old: Any, advantages: Any, scale: Any) -> Any:
    return -(torch.exp(logprobs - old) * advantages).sum() * scale, {}


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_traced_loss_trains_like_the_published_one(fresh: Callable[..., Any]):
    bench = fresh(extra={"custom_losses": True})
    data = [datum(9, 1), datum(4, 2), datum(6, 3)]
    name = loss_id(traced(likelihood, logprobs=1, weights=1))
    for queue_id in ("a", "b"):
        bench.create(queue_id)
        bench.shake(queue_id)
    outputs, metrics = bench.run("a", data, "custom", loss_id=name)
    wanted, published = bench.run("b", data)
    assert metrics["loss:sum"] == pytest.approx(published["loss:sum"], rel=1e-5)
    assert metrics["custom/rows:sum"] == 3.0
    assert metrics["custom/mean:mean"] == pytest.approx(sum(float(row.mean()) for row in outputs) / 3, rel=1e-5)
    assert [row.tolist() for row in outputs] == [row.tolist() for row in wanted]
    norms = [bench.step(queue_id)["grad_norm"] for queue_id in ("a", "b")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    ours, theirs = bench.weights("a"), bench.weights("b")
    assert all(torch.allclose(ours[key], theirs[key], atol=1e-6) for key in ours)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_inputs_of_a_traced_loss_reach_their_rows(fresh: Callable[..., Any]):
    bench = fresh(extra={"custom_losses": True})
    rows = [drawn(length, seed) for length, seed in ((9, 1), (4, 2), (6, 3))]
    mine = [
        (tokens, {"target_tokens": given["target_tokens"], "old": given["logprobs"], "advantages": given["advantages"],
                  "scale": np.float32(2.0), "unread": given["advantages"]})
        for tokens, given in rows
    ]  # fmt: skip
    name = loss_id(traced(sampled, logprobs=1, old=1, advantages=1, scale=0))
    bench.create("a")
    _, metrics = bench.run("a", mine, "custom", loss_id=name)
    _, published = bench.run("a", rows, "importance_sampling")
    assert metrics["loss:sum"] == pytest.approx(2 * published["loss:sum"], rel=1e-5)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_results_name_the_digest_of_a_traced_loss(fresh: Callable[..., Any]):
    bench = fresh(extra={"custom_losses": True})
    bench.create("a")
    name = loss_id(traced(likelihood, logprobs=1, weights=1))
    [found], _ = bench.executor.run([Pass("a", request([datum(5, 1)], "custom", loss_id=name), 1)])
    digest = hashlib.sha256(unpacked(name)).hexdigest()
    assert codec.read_output_type(found) == f"ArrayRecord;loss=custom;sha256={digest}"


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_rows_that_do_not_fit_a_traced_loss_are_refused_by_name(fresh: Callable[..., Any]):
    bench = fresh(extra={"custom_losses": True})
    bench.create("a")
    name = loss_id(traced(clipped, logprobs=1, old=1, advantages=1))
    with pytest.raises(UserError, match="the loss_fn_input 'old' is missing"):
        bench.run("a", [datum(5, 1)], "custom", loss_id=name)
    flat = {"old": np.zeros((5, 1), np.float32), "advantages": np.zeros(5, np.float32)}
    with pytest.raises(UserError, match="'old' has 2 dimensions; the loss takes it with 1"):
        bench.run("a", [datum(5, 1, **flat)], "custom", loss_id=name)
    with pytest.raises(UserError, match="loss_id must be one"):
        bench.run("a", [datum(5, 1)], "custom", loss_id="loss.x")
    with pytest.raises(UserError, match="loss_id must be one"):
        bench.run("a", [datum(5, 1)], "custom")


def test_traced_losses_are_refused_where_they_are_not_switched_on(bench: Any):
    bench.create("a")
    with pytest.raises(UserError, match="unknown loss_fn 'custom'"):
        bench.run("a", [datum(5, 1)], "custom", loss_id="loss.x")


def doubled(levels: int) -> LossGraph:
    """Return a graph in which each step gives a list that holds the one before it twice."""
    both = {"slice": [None, None]}
    steps: list[tuple[str, list[Any]]] = [("operator.getitem", [[X, X], both])]
    for level in range(levels):
        steps.append(("operator.getitem", [[{"ref": f"n{level}"}] * 2, both]))
    return graph_of(*steps, ("torch.sum", [X]))


@pytest.mark.parametrize("levels", [1, 12, 60, 200])
def test_lists_that_share_their_entries_are_not_walked_through(levels: int):
    with pytest.raises(UserError, match=r"node 'n1' .getitem.: a step must return a tensor, a number, or a flat list"):
        graphs.run(doubled(levels), {"logprobs": torch.zeros(4)})


@pytest.mark.full
def test_other_models_of_the_same_pass_are_trained_though_one_graph_is_refused(fresh: Callable[..., Any]):
    bench = fresh(extra={"custom_losses": True})
    for queue_id in ("a", "b"):
        bench.create(queue_id)
    hostile = request([datum(9, 1)], "custom", loss_id=loss_id(doubled(60)))
    results, _ = bench.executor.run([Pass("a", hostile, 1), Pass("b", request([datum(9, 1)]), 1)])
    assert isinstance(results[0], UserError)
    answer(results[1])
    assert bench.step("b")["grad_norm"] > 0


def test_a_step_that_is_used_often_is_done_once():
    calls = []
    steps: list[tuple[str, list[Any]]] = [("torch.exp", [X])]
    for level in range(30):  # 2**30 uses of the first step
        steps.append(("operator.add", [{"ref": f"n{level}"}] * 2))
    graph = graph_of(*steps, ("torch.mean", [{"ref": "n30"}]))
    logprobs = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    budget = graphs.Budget(1e9, clock=lambda: calls.append(None) or 0.0)
    loss, gradient, _ = graphs.value_and_gradient(graph, {"logprobs": logprobs}, "logprobs", budget)
    assert loss.item() == 2.0**30
    assert gradient is not None
    assert gradient.tolist() == [2.0**28] * 4
    assert len(calls) <= 3 * len(graph.nodes) + 2  # before each step, and before each step's gradient


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([("operator.getitem", [X, [0] * 5000])], "must consist of numbers, slices and masks"),
        ([("operator.getitem", [X, {"tuple": [[[0, 1]] * 100]}])], "must consist of numbers, slices and masks"),
        ([("torch.cat", [X])], "must be a list of tensors"),
        ([("torch.stack", [X])], "must be a list of tensors"),
        ([("torch.unsqueeze", [X, 2**64 - 1])], "unsqueeze"),
        ([("operator.getitem", [X])], "getitem"),
        ([("torch.clamp", [X, "a"])], "clamp"),
        ([("torch.sum", [X, {"slice": [None, None, 0]}])], "sum"),
        ([("operator.getitem", [X, {"slice": [None, None, 0]}])], "getitem"),
        ([("operator.truediv", [1, 0])], "truediv"),
    ],
)
def test_a_step_that_would_make_more_than_is_counted_is_refused(steps: list[Any], words: str):
    with pytest.raises(UserError, match=words):
        graphs.run(graph_of(*steps), {"logprobs": torch.zeros(600)})


CHAIN: list[tuple[str, list[Any]]] = [("torch.exp", [X]), *(("torch.sin", [{"ref": f"n{n}"}]) for n in range(9))]


@pytest.mark.parametrize("seconds", [3, 14])
def test_time_is_limited_in_the_evaluation_and_in_its_backward(seconds: float):
    ticks = iter(range(1000))
    graph = graph_of(*CHAIN, ("torch.sum", [{"ref": "n9"}]))
    budget = graphs.Budget(seconds, nodes=len(graph.nodes), rows=1, clock=lambda: float(next(ticks)))
    logprobs = torch.zeros(4, requires_grad=True)
    if seconds > len(graph.nodes):  # enough for the evaluation alone
        graphs.run(graph, {"logprobs": logprobs}, budget)
        ticks = iter(range(1000))
    with pytest.raises(
        UserError, match=f"11 nodes for 1 rows took longer than {seconds} s, which is the limit"
    ) as late:
        graphs.value_and_gradient(graph, {"logprobs": logprobs}, "logprobs", budget)
    assert is_passing(late.value), "it took less time before: its model is made again later"
    assert next(ticks) < 2 * len(graph.nodes), "it ended where time was over"


def test_time_is_counted_over_all_rows_of_an_operation(fresh: Callable[..., Any]):
    name = loss_id(graph_of(*CHAIN, ("torch.sum", [{"ref": "n9"}])))
    bench = fresh(extra={"custom_losses": True, "custom_seconds": 1e-9})
    bench.create("a")
    with pytest.raises(UserError, match=r"11 nodes for 3 rows took longer than 1e-09 s") as late:
        bench.run("a", [datum(5, seed) for seed in range(3)], "custom", loss_id=name)
    assert is_passing(late.value)


@pytest.mark.full
def test_steps_of_all_rows_are_counted_before_the_first_is_done(fresh: Callable[..., Any]):
    name = loss_id(graph_of(*[("torch.exp", [X])] * 1000, ("torch.sum", [X])))
    bench = fresh(extra={"custom_losses": True})
    bench.create("a")
    with pytest.raises(UserError, match=r"at most 524288 steps, got 600600 .1001 nodes for 600 rows"):
        bench.run("a", [datum(2, seed) for seed in range(600)], "custom", loss_id=name)
