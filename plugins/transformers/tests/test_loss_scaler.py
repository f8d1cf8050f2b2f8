"""The loss scale against torch's own over random overflows, and what it does to a loss."""

import random
from typing import Any

import pytest
import torch

from twinkle.errors import ArgumentError, CheckpointError
from twinkle_transformers.loss_scaler import LossScaler

CONFIG: dict[str, Any] = {"init_scale": 1024.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 3}


def torch_step(scaler: torch.amp.GradScaler, overflow: bool) -> float:
    """Make one step of torch's scaler with a gradient that is finite or not; return the scale after it."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scaler.scale(parameter.sum()).backward()  # type: ignore[no-untyped-call]
    if overflow:
        assert parameter.grad is not None
        parameter.grad.fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


@pytest.mark.parametrize("config", [CONFIG, {}, {**CONFIG, "growth_interval": 1, "growth_factor": 2.0}])
def test_the_scale_is_torchs_over_a_random_sequence_of_overflows(config: dict[str, Any]) -> None:
    ours, theirs = LossScaler(**config), torch.amp.GradScaler("cpu", **config)
    draw = random.Random(7)
    for _ in range(120):
        overflow = draw.random() < 0.2
        ours.update(overflow)
        assert ours.factor == pytest.approx(torch_step(theirs, overflow), rel=1e-6)
    assert ours.state_dict() == pytest.approx(theirs.state_dict(), rel=1e-6)


def test_it_goes_on_from_its_own_state_and_from_torchs() -> None:
    theirs = torch.amp.GradScaler("cpu", **CONFIG)
    for overflow in (True, False, False):
        torch_step(theirs, overflow)
    ours, other = LossScaler(), LossScaler()
    ours.load_state_dict(theirs.state_dict())
    other.load_state_dict(ours.state_dict())
    assert torch_step(theirs, False) == 768.0
    for scaler in (ours, other):
        scaler.update(False)
        assert scaler.factor == 768.0


def test_a_scaled_gradient_divided_by_the_factor_is_the_gradient() -> None:
    scaler = LossScaler()
    parameter = torch.nn.Parameter(torch.tensor([1.5, -2.0]))
    scaler.scale(parameter.square().sum()).backward()  # type: ignore[no-untyped-call]
    assert parameter.grad is not None
    assert torch.equal(parameter.grad / scaler.factor, 2 * parameter.detach())


def test_a_half_precision_loss_does_not_overflow_by_being_scaled() -> None:
    loss = LossScaler().scale(torch.tensor(3.0, dtype=torch.float16))
    assert (loss.dtype, float(loss)) == (torch.float32, 3.0 * 65536)
    assert LossScaler().scale(torch.tensor(3.0, dtype=torch.float64)).dtype == torch.float64


def test_a_scaler_that_is_off_does_nothing() -> None:
    scaler = LossScaler(enabled=False)
    loss = torch.tensor(3.0)
    scaler.update(True)
    assert scaler.scale(loss) is loss
    assert (scaler.factor, scaler.state_dict(), scaler.exhausted) == (1.0, {}, True)  # there is no scale to lower
    scaler.load_state_dict({})


def test_the_scale_never_leaves_the_numbers_of_float32() -> None:
    scaler = LossScaler(init_scale=1e38, growth_interval=1)
    for _ in range(9):
        scaler.update(False)
    assert 1e38 < scaler.factor < 3.5e38
    for _ in range(400):
        scaler.update(True)
    assert scaler.factor == 2.0**-14
    assert scaler.exhausted
    scaler.update(False)
    assert not scaler.exhausted
    assert scaler.factor == 2.0**-13


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"init_scale": 0.0}, "init_scale must be a number above 0, got 0.0"),
        ({"init_scale": float("inf")}, "init_scale .* got inf"),
        ({"growth_factor": 1.0}, "growth_factor .* got 1.0"),
        ({"backoff_factor": 1.0}, "backoff_factor .* got 1.0"),
        ({"growth_interval": 0}, "growth_interval .* got 0"),
        ({"init_scal": 1.0}, "init_scale"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        LossScaler.from_config(config)


def test_no_configuration_is_the_default_one() -> None:
    assert LossScaler.from_config(None).state_dict() == torch.amp.GradScaler("cpu").state_dict()


def test_the_state_of_a_run_without_scaler_is_named() -> None:
    with pytest.raises(CheckpointError, match="lacks 'scale'"):
        LossScaler().load_state_dict({})
