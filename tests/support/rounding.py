"""What rounding does on this machine to a computation of a test: the limit for another way to compute the same."""

import os
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from twinkle_testing.other_machine import VARIABLE, RoundsByRows
from twinkle_torch.numerics import RoundingNoise, distance

FACTOR = 6.0
"""Two ways to compute the same may differ by this many times the measured rounding. Each way has an error of its own,
which gives 2; the error of a product is at most twice what the noise has on average, which gives 4; and the largest of
two draws may be two thirds of what other draws give."""
USELESS = 1e-2
"""A limit above this relative difference could hide a fault, so that no test may rely on one."""


def units() -> float:
    """Return by how many units in the last place products of this process may differ between numbers of rows."""
    return max(1.0, float(os.environ.get(VARIABLE) or 1.0))


def rounding_of(compute: Callable[[], Sequence[Tensor]], *, draws: int = 2) -> list[float]:
    """Return how far rounding moves each tensor that a computation returns, relative to its norm.

    Args:
        compute: deterministic; may train, so that the movement includes what the updates amplify.
        draws: number of runs with noise of the size of rounding.
    """
    plain = compute()
    limits = [torch.finfo(value.dtype).eps for value in plain]
    for seed in range(draws):
        with RoundingNoise(seed, units=units()):
            noisy = compute()
        limits = [max(limit, gap(one, other)) for limit, one, other in zip(limits, noisy, plain, strict=True)]
    return limits


def measured_rounding(compute: Callable[..., Sequence[Tensor]]) -> list[float]:
    """Return how far rounding moves each tensor of a long computation, relative to its norm.

    That is the larger of two distances from float64: of float32 as it is here, and of float32 where products round by
    their number of rows.

    Args:
        compute: takes `dtype=torch.float64`, or nothing for float32; returns tensors.
    """
    exact, plain = compute(dtype=torch.float64), compute()
    with RoundsByRows():
        moved = compute()
    return [max(gap(p, e), gap(m, e)) for p, m, e in zip(plain, moved, exact, strict=True)]


def gap(one: Tensor, other: Tensor) -> float:
    """Return how far two tensors are apart, relative to the norm of the second one."""
    return float(distance(one.reshape(1, -1), other.reshape(1, -1)))


def assert_near(ours: Sequence[Tensor], theirs: Sequence[Tensor], limits: Sequence[float], message: str = "") -> None:
    """Demand that rounding explains how far tensors are apart, and that the limits can tell a fault from it."""
    for at, (one, other, limit) in enumerate(zip(ours, theirs, limits, strict=True)):
        assert FACTOR * limit < USELESS, f"{message}, tensor {at}: its rounding is {limit}"
        assert gap(one, other) <= FACTOR * limit, f"{message}, tensor {at}: rounding is {limit}"


def rounds_alike(weights: Sequence[Tensor], few: int, many: int) -> bool:
    """Whether rows have the same bits among `few` rows and among `many` in products with matrices, here and now.

    A property of processor, library and shapes: it holds for products of one kernel, and those of other row counts may
    go through another.
    """
    draw = torch.Generator().manual_seed(0)
    for weight in weights:
        for matrix in (weight.detach(), weight.detach().t()):
            rows = torch.randn(many, matrix.shape[1], generator=draw, dtype=matrix.dtype)
            if not torch.equal((rows @ matrix.t())[:few], rows[:few] @ matrix.t()):
                return False
    return True


@pytest.fixture
def rounds_by_rows() -> Iterator[None]:
    """Let products of a test round by their number of rows."""
    with RoundsByRows():
        yield
