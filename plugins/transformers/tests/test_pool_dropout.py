"""Dropout that neighbours and resuming do not change, and the dtypes in which adapters train."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pools import (
    distance,
    flat_of,
    folder,  # noqa: F401 - a fixture
    lora,
    make_rows,
    open_pool,
)
from threads import one_thread  # noqa: F401 - a fixture

from twinkle.engine import Operation, OperationResult
from twinkle_transformers.model import TransformersModel

ROWS = {name: make_rows(2, (9, 6), seed=at) for at, name in enumerate(("a", "b", "c"))}
MIXED = [row for name in "abc" for row in ROWS[name]]
NAMES = ["a", "a", "b", "b", "c", "c"]


def three_adapters(folder: Path, **options: Any) -> Any:
    model = open_pool(folder, **options)
    for at, name in enumerate(("a", "b", "c")):
        model.add_adapter_to_model(name, lora(2 + at), seed=at)
        model.set_optimizer("AdamW", lr=1e-2, adapter_name=name)
    return model


DROPS: dict[str, Any] = {"lora_dropout": 0.25}


def test_dropout_is_a_function_of_seed_operation_row_and_position(folder: Path, tmp_path: Path) -> None:
    rows = make_rows(3, 9, seed=1)

    def train(neighbours: int, **call: Any) -> Any:
        model = open_pool(folder)
        model.add_adapter_to_model("a", lora(3, **DROPS), seed=5)
        model.set_optimizer("AdamW", lr=1e-2, adapter_name="a")
        for number in range(neighbours):
            model.add_adapter_to_model(f"n{number}", lora(3, lora_dropout=0.25 * (number % 2)), seed=number)
            model.set_optimizer("AdamW", lr=1e-2, adapter_name=f"n{number}")
        torch.manual_seed(neighbours)  # the global generator has no part in it
        found = []
        for _ in range(2):
            names = [f"n{number}" for number in range(neighbours)] + ["a"] * 3
            output = model.forward_backward(inputs=rows[:1] * neighbours + rows, adapter_name=names, **call)
            found.append(torch.stack([o["logps"] for o in output[neighbours:]]))
            found.append(flat_of(model, "a").grad.clone())
            model.clip_grad_and_step(adapter_name=["a"])
        return model, found

    model, alone = train(0)
    assert all(torch.equal(one, other) for one, other in zip(train(4)[1], alone, strict=True))
    assert all(distance(one, other) < 2e-6 for one, other in zip(train(3, micro_batch_size=2)[1], alone, strict=True))
    assert not torch.equal(alone[0], alone[2])

    model.save("a", str(tmp_path), adapter_name="a", save_optimizer=True)
    next_one = model.forward_backward(inputs=rows, adapter_name="a")["logps"]
    again = open_pool(folder)
    again.add_adapter_to_model("a", str(tmp_path / "a"), seed=99)
    again.set_optimizer("AdamW", lr=1e-2, adapter_name="a")
    again.resume_from_checkpoint(str(tmp_path / "a"), adapter_name="a")
    assert torch.equal(again.forward_backward(inputs=rows, adapter_name="a")["logps"], next_one)


def test_two_operations_of_one_adapter_in_one_call_drop_other_features(folder: Path) -> None:
    rows = make_rows(1, 9, seed=1)
    model, serial = open_pool(folder), open_pool(folder)
    for pool in (model, serial):
        pool.add_adapter_to_model("a", lora(3, **DROPS), seed=7)
    operation = Operation("a", "forward_backward", rows)
    results = model.pool.run([operation, operation])
    one_by_one = [serial.pool.run([operation])[0] for _ in range(2)]
    for result, expected in zip(results, one_by_one, strict=True):
        assert torch.equal(result.outputs[0]["logps"], expected.outputs[0]["logps"])
    assert torch.equal(flat_of(model, "a").grad, flat_of(serial, "a").grad)


@pytest.mark.full
def test_dropout_keeps_the_mean_and_is_off_without_training(folder: Path) -> None:
    model = open_pool(folder)
    # Masks move a small adapter's log-probabilities linearly, so that their mean is that without a mask.
    small = {"lora_alpha": 0.0625, "target_modules": ["v_proj"]}
    model.add_adapter_to_model("drops", lora(4, **small, **DROPS), seed=3)
    model.add_adapter_to_model("keeps", lora(4, **small), seed=3)
    row = make_rows(1, 9, seed=1)
    draws = []
    for number in range(100):
        [result] = model.pool.run([Operation("drops", "forward_backward", row, number=number)])
        assert isinstance(result, OperationResult)
        draws.append(result.outputs[0]["logps"][:8].double())
    kept = model.forward_only(inputs=row, adapter_name="keeps")["logps"][0]
    base = model.forward_only(inputs=row, adapter_name=[None])[0]["logps"][:8].double()
    drawn = torch.stack(draws)
    error = drawn.std(0) / 10
    assert float(((drawn.mean(0) - kept[:8]) / error).abs().max()) < 4
    unscaled = DROPS["lora_dropout"] * (kept[:8] - base) / error  # how far off it is if the rest is not scaled up
    assert float(unscaled.abs().max()) > 4, "the test must be able to fail"
    assert torch.equal(model.forward_only(inputs=row, adapter_name="drops")["logps"][0], kept)


def test_dropout_s_gradient_is_that_of_the_masked_function(folder: Path) -> None:
    """A small step along the gradient changes the loss by its squared length."""
    model = open_pool(folder)
    model.add_adapter_to_model("a", lora(4, **DROPS), seed=3)
    operation = Operation("a", "forward_backward", make_rows(2, 9, seed=1), number=5)
    [before] = model.pool.run([operation])
    flat = flat_of(model, "a")
    step, square = flat.grad.clone(), float(flat.grad.double().square().sum())
    losses = []
    for sign in (1, -1):
        flat.data.add_(step, alpha=sign * 1e-3 / math.sqrt(square))
        losses.append(model.pool.run([operation])[0].loss_sum)
        flat.data.sub_(step, alpha=sign * 1e-3 / math.sqrt(square))
    assert (losses[0] - losses[1]) / 2e-3 == pytest.approx(math.sqrt(square), rel=2e-2)
    assert losses[1] < before.loss_sum < losses[0]


@pytest.mark.full
def test_in_bf16_adapters_train_in_float32_and_no_farther_from_it_than_peft(folder: Path, tmp_path: Path) -> None:
    half, full = three_adapters(folder, mixed_precision="bf16"), three_adapters(folder)
    full.save("b", str(tmp_path), adapter_name="b")
    plain = TransformersModel(model_id=str(folder), mixed_precision="bf16")
    plain.add_adapter_to_model("b", str(tmp_path / "b"))
    for model in (half, full):
        outputs = model.forward_backward(inputs=MIXED, adapter_name=NAMES)
        assert outputs[0]["logps"].dtype == torch.float32
        assert flat_of(model, "b").grad.dtype == flat_of(model, "b").dtype == torch.float32
    plain.forward_backward(inputs=ROWS["b"])
    peft = {n.replace(".b.", "."): p.grad.ravel() for n, p in plain.model.named_parameters() if p.grad is not None}
    mine, exact = (
        {name: view.grad.ravel() for name, view in model.pool.tenants["b"].views().items()} for model in (half, full)
    )
    gaps = [distance(torch.cat([g[n] for n in exact]), torch.cat(list(exact.values()))) for g in (mine, peft)]
    assert 1e-6 < gaps[0] < 1.2 * gaps[1]


def test_a_base_in_float64_trains_adapters_in_float32(folder: Path) -> None:
    model, plain = three_adapters(folder, dtype=torch.float64), three_adapters(folder)
    for each in (model, plain):
        each.forward_backward(inputs=MIXED, adapter_name=NAMES)
    for name in "abc":
        assert distance(flat_of(model, name).grad, flat_of(plain, name).grad) < 2e-5  # of float32's own rounding
    model.clip_grad_and_step(adapter_name=["a", "b", "c"])
