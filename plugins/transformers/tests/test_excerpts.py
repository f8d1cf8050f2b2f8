"""The routing of some sequences of a stream gives each of their rows what the routing of the whole gives it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twinkle_transformers.lowrank.grouped import Groups
from twinkle_transformers.lowrank.layout import Layout, Shape
from twinkle_transformers.lowrank.products import AdapterGroup, Routing, excerpt, linear

LENGTHS = (3, 2, 4, 1, 5, 2)
OWNERS = ((0, 1), (2,), (3,), (4,))
"""Sequences of each operation; the last sequence is the base's."""
BOUNDS = [(sum(LENGTHS[:at]), sum(LENGTHS[: at + 1])) for at in range(len(LENGTHS))]
LAYOUTS = (Layout.of([("x", Shape(2, 4, 3, 0.5))]), Layout.of([("x", Shape(3, 4, 3, 2.0))]))


def rows_of(operation: int) -> int:
    return sum(LENGTHS[sequence] for sequence in OWNERS[operation])


def masks(start: int) -> object:
    """Return dropout that is a function of a row's place in the stream."""

    def mask(name: str, features: int, dtype: torch.dtype) -> Tensor:
        rows = sum(rows_of(at) for at in (2, 3))
        return torch.sin(torch.arange(start, start + rows, dtype=dtype)[:, None] + torch.arange(features))

    return mask


def routing(trained: int) -> tuple[Routing, list[AdapterGroup]]:
    """Return two adapter_groups: the first two operations of one layout, the others of another, with dropout."""
    draw = torch.Generator().manual_seed(0)
    found, start = [], 0
    for number, layout in enumerate(LAYOUTS):
        lengths = tuple(rows_of(at) for at in (2 * number, 2 * number + 1))
        weights = torch.randn(2, layout.size, generator=draw, dtype=torch.float64)
        grads = torch.zeros_like(weights) if trained else None
        dropout = masks(start) if number else None
        found.append(AdapterGroup(layout, Groups(start, lengths), weights, grads, dropout))  # type: ignore[arg-type]
        start += sum(lengths)
    return Routing(found, sum(LENGTHS), trained), found


def data() -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    shapes = ((sum(LENGTHS), 4), (3, 4), (sum(LENGTHS), 3))
    x, weight, upper = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes)
    return x, weight, upper


def cut(tensor: Tensor, chosen: list[int]) -> Tensor:
    return torch.cat([tensor[slice(*BOUNDS[at])] for at in chosen])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=6, max_size=6))
def test_calls_of_any_parts_are_one_call_of_the_whole(parts: list[int]) -> None:
    x, weight, upper = data()
    whole, adapter_groups = routing(15)
    whole_x = x.clone().requires_grad_()
    wanted = linear(whole_x, weight, None, whole, "x")
    (wanted * upper)[:15].sum().backward()
    split, others = routing(15)
    for part in set(parts):
        chosen = [at for at, mine in enumerate(parts) if mine == part]
        mine = cut(x, chosen).requires_grad_()
        small = excerpt(split, [BOUNDS[at] for at in chosen])
        assert small.total == len(mine)
        found = linear(mine, weight, None, small, "x")
        torch.testing.assert_close(found, cut(wanted, chosen))
        if small.trained:
            (found * cut(upper, chosen))[: small.trained].sum().backward()
            assert whole_x.grad is not None
            torch.testing.assert_close(mine.grad, cut(whole_x.grad, chosen))
    for one, other in zip(others, adapter_groups, strict=True):
        torch.testing.assert_close(one.grads, other.grads)


@pytest.mark.parametrize("chosen", [[5], [0, 5]])
def test_rows_of_the_base_have_no_terms(chosen: list[int]) -> None:
    split, _ = routing(0)
    small = excerpt(split, [BOUNDS[at] for at in chosen])
    assert small.trained == 0
    assert [adapter_group.groups.lengths for adapter_group in small.adapter_groups] == [(3,)] * (len(chosen) - 1)
