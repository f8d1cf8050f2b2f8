"""Warm-up schedulers against their closed forms, and the same after a resume."""

import math
from typing import Any

import pytest
import torch

from twinkle.scheduler import CosineWarmupScheduler, LinearWarmupScheduler


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
    with pytest.raises(ValueError, match="num_training_steps=0"):
        CosineWarmupScheduler(optimizer(), num_warmup_steps=0, num_training_steps=0)
