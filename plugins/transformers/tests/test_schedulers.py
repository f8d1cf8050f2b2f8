"""Warm-up schedulers against their closed forms; every scheduler by name, and the same after a resume."""

import inspect
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twinkle import registry
from twinkle.errors import ArgumentError
from twinkle.scheduler import (
    ConstantWarmupScheduler,
    CosineRestartsWarmupScheduler,
    CosineWarmupScheduler,
    InverseSqrtWarmupScheduler,
    LinearWarmupScheduler,
    PolynomialWarmupScheduler,
    WSDScheduler,
)
from twinkle_transformers.optimizers import build_scheduler
from twinkle_transformers.training_state import decode_state, encode_state


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)


def rates(scheduler_cls: Any, steps: int, **kwargs: Any) -> list[float]:
    used = optimizer()
    scheduler = scheduler_cls(used, **kwargs)
    seen = []
    for _ in range(steps):
        seen.append(used.param_groups[0]["lr"])
        used.step()
        scheduler.step()
    return seen


def test_cosine_warms_up_from_0_and_falls_to_0() -> None:
    wanted = [2.0 * s / 3 for s in range(3)] + [1.0 + math.cos(math.pi * s / 7) for s in range(7)] + [0.0, 0.0]
    assert rates(CosineWarmupScheduler, 12, num_warmup_steps=3, num_training_steps=10) == pytest.approx(wanted)


def test_linear_warms_up_from_0_and_falls_to_0() -> None:
    wanted = [0.0, 1.0, 2.0, 1.5, 1.0, 0.5, 0.0, 0.0]
    assert rates(LinearWarmupScheduler, 8, num_warmup_steps=2, num_training_steps=6) == pytest.approx(wanted)


def test_both_agree_with_transformers() -> None:
    from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

    for ours, theirs in (
        (CosineWarmupScheduler, get_cosine_schedule_with_warmup),
        (LinearWarmupScheduler, get_linear_schedule_with_warmup),
    ):
        wanted = rates(theirs, 11, num_warmup_steps=3, num_training_steps=10)
        assert rates(ours, 11, num_warmup_steps=3, num_training_steps=10) == pytest.approx(wanted)


def test_a_restored_scheduler_goes_on_at_the_same_rate() -> None:
    whole = rates(CosineWarmupScheduler, 10, num_warmup_steps=3, num_training_steps=10)
    first = optimizer()
    scheduler = CosineWarmupScheduler(first, num_warmup_steps=3, num_training_steps=10)
    for _ in range(5):
        first.step()
        scheduler.step()
    second = optimizer()
    resumed = CosineWarmupScheduler(second, num_warmup_steps=3, num_training_steps=10)
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict(scheduler.state_dict())
    assert second.param_groups[0]["lr"] == whole[5]
    second.step()
    resumed.step()
    assert second.param_groups[0]["lr"] == whole[6]


def test_impossible_step_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="num_training_steps must be an integer of at least 1, got 0"):
        CosineWarmupScheduler(optimizer(), num_warmup_steps=0, num_training_steps=0)


# the other warm-up schedulers


def test_constant_warms_up_and_stays() -> None:
    assert rates(ConstantWarmupScheduler, 6, num_warmup_steps=4) == pytest.approx([0.0, 0.5, 1.0, 1.5, 2.0, 2.0])


def test_cosine_with_restarts_begins_each_cycle_at_the_full_rate() -> None:
    cycle = [1.0 + math.cos(math.pi * s / 4) for s in range(4)]
    wanted = [0.0, 1.0, *cycle, *cycle, 0.0, 0.0]
    arguments = {"num_warmup_steps": 2, "num_training_steps": 10, "num_cycles": 2}
    assert rates(CosineRestartsWarmupScheduler, 12, **arguments) == pytest.approx(wanted)


def test_polynomial_falls_as_a_power_to_its_lowest() -> None:
    wanted = [0.0, 1.0, *(0.2 + 1.8 * (1 - s / 4) ** 3 for s in range(4)), 0.2, 0.2]
    arguments = {"num_warmup_steps": 2, "num_training_steps": 6, "power": 3.0, "min_lr_ratio": 0.1}
    assert rates(PolynomialWarmupScheduler, 8, **arguments) == pytest.approx(wanted)


@pytest.mark.parametrize(("warmup", "timescale", "used"), [(3, None, 3), (3, 8, 8), (0, None, 10_000)])
def test_inverse_square_root_falls_from_the_full_rate(warmup: int, timescale: int | None, used: int) -> None:
    wanted = [2.0 * s / 3 for s in range(warmup)] + [2.0 / math.sqrt(1 + s / used) for s in range(9 - warmup)]
    found = rates(InverseSqrtWarmupScheduler, 9, num_warmup_steps=warmup, timescale=timescale)
    assert found == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("form", "falling"),
    [
        ("linear", lambda p: 1 - p),
        ("cosine", lambda p: 0.5 + 0.5 * math.cos(math.pi * p)),
        ("1-sqrt", lambda p: 1 - math.sqrt(p)),
    ],
)
def test_wsd_warms_up_stays_and_decays(form: str, falling: Callable[[float], float]) -> None:
    decay = [0.2 + 1.8 * falling(s / 4) for s in range(5)]
    wanted = [0.0, 1.0, 2.0, 2.0, 2.0, *decay, 0.2]
    arguments = {"num_warmup_steps": 2, "num_training_steps": 9, "num_decay_steps": 4, "min_lr_ratio": 0.1}
    assert rates(WSDScheduler, 11, decay_type=form, **arguments) == pytest.approx(wanted)


def test_wsd_decays_over_a_tenth_by_default_and_may_not_decay_at_all() -> None:
    assert rates(WSDScheduler, 12, num_warmup_steps=0, num_training_steps=11)[8:] == pytest.approx([2.0, 2.0, 1.0, 0.0])
    never = rates(WSDScheduler, 5, num_warmup_steps=0, num_training_steps=4, num_decay_steps=0)
    assert never == [2.0, 2.0, 2.0, 2.0, 0.0]


def test_they_agree_with_transformers() -> None:
    import transformers as hf

    common = {"num_warmup_steps": 3, "num_training_steps": 12}
    pairs: list[tuple[Any, dict[str, Any], Any, dict[str, Any]]] = [
        (ConstantWarmupScheduler, common, hf.get_constant_schedule_with_warmup, {"num_warmup_steps": 3}),
        (
            CosineRestartsWarmupScheduler,
            {**common, "num_cycles": 3},
            hf.get_cosine_with_hard_restarts_schedule_with_warmup,
            {**common, "num_cycles": 3},
        ),
        (
            PolynomialWarmupScheduler,
            {**common, "power": 2.0, "min_lr_ratio": 0.25},
            hf.get_polynomial_decay_schedule_with_warmup,
            {**common, "power": 2.0, "lr_end": 0.5},
        ),
        (InverseSqrtWarmupScheduler, common, hf.get_inverse_sqrt_schedule, {"num_warmup_steps": 3}),
        (
            WSDScheduler,
            {**common, "num_decay_steps": 4, "decay_type": "cosine"},
            hf.get_wsd_schedule,
            {**common, "num_decay_steps": 4},
        ),
    ]
    for ours, own, theirs, arguments in pairs:
        assert rates(ours, 14, **own) == pytest.approx(rates(theirs, 14, **arguments), abs=1e-12)


@given(warmup=st.integers(0, 30), training=st.integers(1, 60), steps=st.integers(0, 90))
def test_a_factor_is_never_outside_0_and_1(warmup: int, training: int, steps: int) -> None:
    for scheduler_cls in (CosineRestartsWarmupScheduler, PolynomialWarmupScheduler, InverseSqrtWarmupScheduler):
        try:
            made = scheduler_cls(optimizer(), num_warmup_steps=warmup, num_training_steps=training)
        except ValueError:
            assert warmup > training
            continue
        assert 0.0 <= made.factor(steps) <= 1.0
        assert made.factor(warmup) == 1.0 or training <= warmup


@pytest.mark.parametrize(
    ("scheduler_cls", "arguments", "message"),
    [
        (ConstantWarmupScheduler, {"num_warmup_steps": -1}, "num_warmup_steps must be .* got -1"),
        (ConstantWarmupScheduler, {"num_warmup_steps": 5, "num_training_steps": 4}, "ends before the warm-up of 5"),
        (InverseSqrtWarmupScheduler, {"num_warmup_steps": 5, "timescale": 0}, "timescale must be at least 1, got 0"),
        (
            CosineRestartsWarmupScheduler,
            {"num_warmup_steps": 0, "num_training_steps": 4, "num_cycles": 0},
            "num_cycles must be at least 1, got 0",
        ),
        (
            PolynomialWarmupScheduler,
            {"num_warmup_steps": 0, "num_training_steps": 4, "power": 0},
            "power must be above 0, got 0",
        ),
        (
            PolynomialWarmupScheduler,
            {"num_warmup_steps": 0, "num_training_steps": 4, "min_lr_ratio": 2},
            "between 0 and 1",
        ),
        (WSDScheduler, {"num_warmup_steps": 3, "num_training_steps": 4, "num_decay_steps": 2}, "do not fit"),
        (WSDScheduler, {"num_warmup_steps": 0, "num_training_steps": 4, "decay_type": "step"}, "'1-sqrt'"),
    ],
)
def test_impossible_schedules_are_refused(scheduler_cls: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scheduler_cls(optimizer(), **arguments)


# by name

WARMUP = {"num_warmup_steps": 1, "num_training_steps": 8}
BY_NAME: dict[str, dict[str, Any]] = {
    "CosineWarmupScheduler": WARMUP,
    "LinearWarmupScheduler": WARMUP,
    "CosineRestartsWarmupScheduler": {**WARMUP, "num_cycles": 2},
    "PolynomialWarmupScheduler": WARMUP,
    "ConstantWarmupScheduler": WARMUP,
    "InverseSqrtWarmupScheduler": WARMUP,
    "WSDScheduler": {**WARMUP, "num_decay_steps": 3},
    "LambdaLR": {"lr_lambda": lambda step: 1 / (1 + step)},
    "MultiplicativeLR": {"lr_lambda": lambda step: 0.5},
    "StepLR": {"step_size": 2},
    "MultiStepLR": {"milestones": [2, 4]},
    "ConstantLR": {"total_iters": 3},
    "LinearLR": {"total_iters": 5},
    "ExponentialLR": {"gamma": 0.5},
    "CosineAnnealingLR": {"T_max": 5},
    "ReduceLROnPlateau": {"patience": 0},
    "CyclicLR": {"base_lr": 0.1, "max_lr": 1.0, "step_size_up": 2},
    "CosineAnnealingWarmRestarts": {"T_0": 3},
    "OneCycleLR": {"max_lr": 1.0, "total_steps": 9},
    "PolynomialLR": {"total_iters": 6},
    "SequentialLR": {
        "schedulers": [{"scheduler": "LinearLR", "total_iters": 2}, {"scheduler": "WSDScheduler", **WARMUP}],
        "milestones": [3],
    },
    "ChainedScheduler": {
        "schedulers": [{"scheduler": "ConstantLR", "total_iters": 2}, {"scheduler": "ExponentialLR", "gamma": 0.5}]
    },
}


def momentum() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0, momentum=0.9)


def advance(used: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
    seen = []
    for _ in range(steps):
        used.step()
        scheduler.step(*([1.0] if "metrics" in inspect.signature(scheduler.step).parameters else []))
        seen.append(used.param_groups[0]["lr"])
    return seen


def test_every_scheduler_that_the_manifest_names_is_tried_here() -> None:
    assert set(BY_NAME) == set(registry().names("scheduler"))


@pytest.mark.parametrize("name", BY_NAME)
def test_each_is_built_by_name_and_goes_on_from_its_saved_state(name: str) -> None:
    first = momentum()
    scheduler = build_scheduler(name, first, **BY_NAME[name])
    begun = advance(first, scheduler, 4)
    kept = json.loads(json.dumps(encode_state(scheduler.state_dict(), name)))
    second = momentum()
    resumed = build_scheduler(name, second, **BY_NAME[name])
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict(decode_state(kept))
    wanted = advance(first, scheduler, 4)
    assert advance(second, resumed, 4) == wanted
    assert len({2.0, *begun, *wanted}) > 1 or name == "ConstantWarmupScheduler"  # at its full rate after one step


def test_schedulers_within_a_scheduler_follow_each_other() -> None:
    used = optimizer()
    scheduler = build_scheduler("SequentialLR", used, **BY_NAME["SequentialLR"])
    assert used.param_groups[0]["lr"] == pytest.approx(2.0 / 3)
    stable = [2.0 * WSDScheduler(optimizer(), **WARMUP).factor(step) for step in range(3)]
    assert advance(used, scheduler, 5) == pytest.approx([4.0 / 3, 2.0, *stable])
    part = torch.optim.lr_scheduler.ExponentialLR(used := optimizer(), gamma=0.5)
    chained = build_scheduler("ChainedScheduler", used, schedulers=[part])
    assert advance(used, chained, 2) == [1.0, 0.5]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("SequentialLR", {"schedulers": [{"total_iters": 2}], "milestones": []}, "without 'scheduler'"),
        ("SequentialLR", {"schedulers": ["LinearLR"], "milestones": [1]}, "SequentialLR refuses its arguments"),
        ("SequentialLR", {"schedulers": [{"scheduler": "StepLR"}], "milestones": []}, "step_size"),
        ("OneCycleLR", {"max_lr": 1.0}, "OneCycleLR refuses its arguments: You must define"),
        ("StepLR", {"step_size": 1, "last_epoch": 3}, "StepLR refuses its arguments.*initial_lr"),
        ("WSDScheduler", {"num_warmup_steps": 9, "num_training_steps": 4}, "do not fit into num_training_steps=4"),
        ("LambdaLR", {"lr_lambda": [abs, abs]}, "Expected 1 lr_lambdas"),
    ],
)
def test_arguments_that_a_scheduler_refuses_are_an_argument_error(
    name: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        build_scheduler(name, optimizer(), **arguments)
