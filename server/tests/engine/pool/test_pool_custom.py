"""Losses that a client traced: their values and gradients are those of the function, and nothing else runs."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from twinkle_server.engine.backend import UserError
from twinkle_server.engine.pool import custom
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
    handle = loss.trace_loss(function, {"logprobs": 1, "old": 1, "advantages": 1} | ranks, "session")
    nodes = [node.model_dump() for node in loss.encode_graph(handle).nodes]
    return read_loss_id(loss_id(read_graph([one.model_dump() for one in handle.inputs], nodes)))


@pytest.mark.parametrize("function", [clipped, varied])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_value_gradient_and_metrics_are_those_of_the_function(function: Any):
    graph = traced(function)
    old, advantages = torch.randn(7).abs().neg(), torch.randn(7)
    ours = torch.randn(7).abs().neg().requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    loss, metrics = custom.run(graph, {"logprobs": ours, "old": old, "advantages": advantages})
    wanted, said = function(theirs, old, advantages)
    loss.backward()
    wanted.backward()
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert metrics == pytest.approx({name: float(value) for name, value in said.items()})


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
        ([("torch.exp", [X])], "no scalar"),
        ([("torch.exp", [1.0])], "at least one argument is a tensor"),
        ([("operator.pow", [10, 10**9])], "at least one argument is a tensor"),
        ([("operator.getitem", [X, 10**6])], "index"),
        ([("getattr", [X, "grad_fn"])], "shape and ndim"),
        ([("getattr", [X, "__class__"])], "shape and ndim"),
        ([("torch.nn.functional.mse_loss", [X, X, "x"])], "mse_loss"),
        ([("torch.unsqueeze", [X, 1]), ("operator.mul", [{"ref": "n0"}, X])], "beyond"),
        ([("torch.stack", [[X] * 9000])], "beyond"),
        ([("operator.gt", [X, 0]), ("torch.any", [{"ref": "n0"}])], "no scalar of floating point"),
    ],
)
def test_a_step_that_cannot_be_done_is_the_users_fault(steps: list[Any], words: str):
    with pytest.raises(UserError, match=words):
        custom.run(graph_of(*steps), {"logprobs": torch.zeros(6000)})


def test_steps_count_together():
    steps: list[tuple[str, list[Any]]] = [("torch.unsqueeze", [X, 1]), ("torch.unsqueeze", [X, 0])]
    steps += [("operator.mul", [{"ref": "n0"}, {"ref": "n1"}])] * 40
    graph = graph_of(*steps)
    with pytest.raises(UserError, match="beyond"):
        custom.run(graph, {"logprobs": torch.zeros(1000)})
