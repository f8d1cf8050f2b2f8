"""Steps of several adapters asked of the pool itself, as a server does."""

from pathlib import Path
from typing import Any

import pytest
import torch

from twinkle.errors import ArgumentError
from twinkle.model import MultiLoraTransformersModel, Operation, OperationError, Step, StepResult
from twinkle.testing import tiny_model

ROW = {"input_ids": [5, 6, 7, 8, 9], "labels": [6, 7, 8, 9, -100]}
CONFIG = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("steps") / "model")


@pytest.fixture
def model(folder: Path) -> Any:
    model: Any = MultiLoraTransformersModel(model_id=str(folder), mixed_precision="no")
    for seed, name in enumerate("abc"):
        model.add_adapter_to_model(name, CONFIG, seed=seed)
        model.set_optimizer("AdamW", adapter_name=name, lr=1e-2, weight_decay=0.0)
    return model


def train(model: Any, *names: str) -> None:
    found = model.pool.run([Operation(name, "forward_backward", [ROW], loss="CrossEntropyLoss") for name in names])
    assert not [result for result in found if isinstance(result, OperationError)]


def weights(model: Any, name: str) -> torch.Tensor:
    return model.pool.tenants[name].flat.detach().clone()


def test_each_adapter_is_stepped_with_options_of_its_own(model: Any) -> None:
    train(model, "a", "b")
    before = {name: weights(model, name) for name in "ab"}
    grads = {name: model.pool.tenants[name].flat.grad.clone() for name in "ab"}
    steps = [Step("a", optim_params={"lr": 0.5, "betas": (0.5, 0.9)}), Step("b", max_grad_norm=1e-3, divide=False)]
    results = model.pool.step(steps)
    assert [type(result) for result in results] == [StepResult, StepResult]
    for name, result, divisor in (("a", results[0], 4.0), ("b", results[1], 1.0)):
        assert result.updated
        assert result.grad_norm == pytest.approx(float(grads[name].norm()) / divisor, rel=1e-5)
    options = {"a": {"lr": 0.5, "betas": (0.5, 0.9)}, "b": {"lr": 1e-2, "betas": (0.9, 0.999)}}
    for name, result, divisor in (("a", results[0], 4.0), ("b", results[1], 1.0)):
        alone = torch.nn.Parameter(before[name].clone())
        optimizer = torch.optim.AdamW([alone], **options[name], weight_decay=0.0)
        alone.grad = grads[name] / divisor
        if name == "b":
            alone.grad *= 1e-3 / result.grad_norm
        optimizer.step()
        torch.testing.assert_close(weights(model, name), alone.detach(), rtol=1e-5, atol=1e-7)
        assert model.pool.tenants[name].flat.grad is None


def test_a_step_that_cannot_be_made_costs_the_others_nothing(model: Any) -> None:
    train(model, "a", "b")
    before = {name: weights(model, name) for name in "abc"}
    steps = [Step("a"), Step("nobody"), Step("c"), Step("a"), Step("b", optim_params={"lr": -1.0})]
    results = model.pool.step(steps)
    assert isinstance(results[0], StepResult)
    texts = {result.index: str(result.error) for result in results if isinstance(result, OperationError)}
    assert sorted(texts) == [1, 2, 3, 4]
    assert "there is no adapter 'nobody'" in texts[1]
    assert "'c' has no accumulated gradients" in texts[2]
    assert "must be named once" in texts[3]
    assert "lr must be a number of at least 0, got -1.0" in texts[4]
    moved = [name for name in "abc" if not torch.equal(before[name], weights(model, name))]
    assert moved == ["a"]


def test_a_gradient_that_is_not_finite_stops_its_own_step(model: Any) -> None:
    train(model, "a", "b")
    before = {name: weights(model, name) for name in "ab"}
    model.pool.tenants["a"].flat.grad[0] = float("inf")
    results = model.pool.step([Step("a", optim_params={"lr": 0.5}), Step("b")])
    assert isinstance(results[0], OperationError)
    assert "is inf" in str(results[0].error)
    assert model.optimizer_group["a"].learning_rates() == [1e-2]
    assert isinstance(results[1], StepResult)
    assert torch.equal(before["a"], weights(model, "a"))
    assert not torch.equal(before["b"], weights(model, "b"))


def test_an_adapter_without_optimizer_is_told_so(model: Any) -> None:
    model.add_adapter_to_model("d", CONFIG)
    train(model, "d")
    [result] = model.pool.step([Step("d")])
    assert "has no optimizer; call set_optimizer first" in str(result.error)


def test_an_unknown_argument_of_the_step_names_the_nearest(model: Any) -> None:
    train(model, "a")
    with pytest.raises(ArgumentError, match="max_grad_norm"):
        model.clip_grad_and_step(adapter_name=["a"], max_grad_nrom=1.0)


def test_a_step_without_gradients_is_refused_unless_it_is_to_be_one_of_zeros(model: Any) -> None:
    train(model, "a")
    model.pool.step([Step("a")])
    alone = torch.nn.Parameter(weights(model, "a"))
    optimizer = torch.optim.AdamW([alone], lr=1e-2, weight_decay=0.25)
    [state] = model.pool.tenants["a"].group.optimizer.state.values()
    optimizer.state[alone] = {name: value.clone() for name, value in state.items()}
    [refused] = model.pool.step([Step("a")])
    assert isinstance(refused, OperationError)
    assert torch.equal(weights(model, "a"), alone)
    [result] = model.pool.step([Step("a", optim_params={"weight_decay": 0.25}, zero_if_none=True)])
    assert result == StepResult(0.0)
    alone.grad = torch.zeros_like(alone)
    optimizer.step()
    torch.testing.assert_close(weights(model, "a"), alone.detach(), rtol=1e-6, atol=1e-8)
    assert model.pool.tenants["a"].flat.grad is None


def test_others_may_work_between_the_passes_of_one_call(folder: Path) -> None:
    model: Any = MultiLoraTransformersModel(model_id=str(folder), mixed_precision="no", tokens_per_pass=10)
    model.add_adapter_to_model("a", CONFIG, seed=0)
    seen: list[int] = []
    model.pool.between = lambda: seen.append(len(seen))
    rows = [ROW] * 5
    model.pool.run([Operation("a", "forward_backward", rows, loss="CrossEntropyLoss")])
    assert len(seen) == 2
    model.pool.run([Operation("a", "forward", rows[:2])])
    assert len(seen) == 2
