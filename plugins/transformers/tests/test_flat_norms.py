"""Norms are exact at any length; an elementwise optimizer gives a flat tensor the numbers of its pieces."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from twinkle.errors import ArgumentError
from twinkle_transformers.flat_step import is_elementwise, measure, scale_


def noise(size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


# --- norms and factors ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_norms_are_exact_at_any_length(dtype: torch.dtype) -> None:
    grads = [(noise(size, size).abs() + 1).to(dtype) for size in (1, 32_768, 32_769, 100_000, 3_000_001)]
    wanted = torch.stack([grad.double().norm() for grad in grads])
    found = measure(grads)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    error = 1e-5 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(found.double(), wanted, rtol=error, atol=0)


def test_norms_do_not_depend_on_the_number_of_threads() -> None:
    grads, threads = [noise(size, size) for size in (30_000, 700_001)], torch.get_num_threads()
    try:
        found = []
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(measure(grads))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


def test_norms_of_mixed_dtypes_shapes_and_strides() -> None:
    grads = [noise(12, 0).view(3, 4).T, noise(40_000, 1).view(100, 400).T, noise(5, 2).double(), torch.zeros(0)]
    torch.testing.assert_close(measure(grads), torch.stack([grad.double().norm() for grad in grads]))


@pytest.mark.parametrize("factors", [[2.0, 0.0, -1.5], torch.tensor([2.0, 0.0, -1.5])])
def test_each_tensor_is_scaled_by_its_own_factor(factors: Any) -> None:
    grads = [noise(size, size) for size in (3, 1, 4)]
    wanted = [grad * factor for grad, factor in zip(grads, (2.0, 0.0, -1.5), strict=True)]
    scale_(grads, factors)
    assert all(torch.equal(grad, other) for grad, other in zip(grads, wanted, strict=True))


# --- which optimizers one flat tensor serves ---

ELEMENTWISE: dict[str, dict[str, Any]] = {
    "ASGD": {"t0": 1.0},
    "Adadelta": {},
    "Adagrad": {"lr_decay": 0.1},
    "Adam": {"weight_decay": 0.1},
    "AdamW": {"amsgrad": True},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "SGD": {"momentum": 0.9, "nesterov": True},
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_flat_tensor_gets_the_numbers_of_its_pieces(name: str) -> None:
    cls = getattr(torch.optim, name)
    assert is_elementwise(cls)
    shapes = ((4, 6), (7,), (3, 5))
    sizes = [math.prod(shape) for shape in shapes]
    whole = nn.Parameter(noise(sum(sizes), 0).double())
    pieces = [nn.Parameter(p.clone().view(s)) for p, s in zip(whole.detach().split(sizes), shapes, strict=True)]
    options = {"lr": 1e-2, **ELEMENTWISE[name]}
    one, many = cls([whole], **options), cls(pieces, **options)
    for round_ in range(8):
        whole.grad = noise(sum(sizes), round_ + 1).double()
        for piece, grad in zip(pieces, whole.grad.split(sizes), strict=True):
            piece.grad = grad.view_as(piece)
        one.step()
        many.step()
    torch.testing.assert_close(whole.detach(), torch.cat([p.detach().flatten() for p in pieces]), rtol=1e-12, atol=0)


def test_every_optimizer_of_torch_is_known_to_be_elementwise_or_not() -> None:
    names = {name for name, value in vars(torch.optim).items() if isinstance(value, type)}
    assert {name for name in names if is_elementwise(getattr(torch.optim, name))} == set(ELEMENTWISE)


def test_a_subclass_is_elementwise_when_it_says_so() -> None:
    derived = type("Derived", (AdamW,), {})
    assert not is_elementwise(derived)
    assert is_elementwise(type("Declared", (derived,), {"elementwise": True}))
    assert not is_elementwise(type("Refusing", (AdamW,), {"elementwise": False}))


def test_as_many_factors_as_tensors() -> None:
    with pytest.raises(ArgumentError, match="one factor for each tensor, got 1 for 2"):
        scale_([torch.zeros(1), torch.zeros(1)], [1.0])
