"""Low-rank terms of many adapters in one product: against float64 and autograd, each group by itself."""

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twinkle_transformers.lowrank.grouped import Groups, runs
from twinkle_transformers.lowrank.layout import Layout, Shape
from twinkle_transformers.lowrank.products import AdapterGroup, Mask, Routing, linear, stack

IN, OUT = 12, 16
"""Multiples of 16 bytes, as in any model: products with others take kernels that look at where a row begins."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def layout_of(rank: int, scale: float = 0.7) -> Layout:
    return Layout.of([("here", Shape(rank, IN, OUT, scale)), ("there", Shape(rank + 1, OUT, IN, scale))])


def cohort_of(
    layout: Layout, start: int, lengths: tuple[int, ...], *, seed: int, dtype: torch.dtype = torch.float32,
    trains: bool = True, dropout: Mask | None = None,
) -> AdapterGroup:  # fmt: skip
    draw = torch.Generator().manual_seed(seed)
    weights = torch.randn(len(lengths), layout.size, generator=draw, dtype=torch.float64).to(dtype)
    grads = torch.zeros(len(lengths), layout.size, dtype=torch.promote_types(dtype, torch.float32)) if trains else None
    return AdapterGroup(layout, Groups(start, lengths), weights, grads, dropout)


def reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, adapter_groups: list[AdapterGroup], flats: list[Tensor]
) -> Tensor:
    """Return the product in float64, operation by operation."""
    rows = []
    y = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    covered = 0
    for adapter_group, flat in zip(adapter_groups, flats, strict=True):
        entry, at = adapter_group.layout.entries["here"], adapter_group.groups.start
        rows.append(y[covered:at])
        mask = 1.0 if adapter_group.dropout is None else adapter_group.dropout("here", IN, torch.float64)
        inside = x.double()[at : adapter_group.groups.stop] * mask
        for number, length in enumerate(adapter_group.groups.lengths):
            down, up = entry.down_of(flat[number]), entry.up_of(flat[number])
            part = inside[at - adapter_group.groups.start :][:length]
            rows.append(y[at : at + length] + entry.scale * part @ down.t() @ up)
            at += length
        covered = at
    return torch.cat([*rows, y[covered:]])


def check(
    adapter_groups: list[AdapterGroup], total: int, trained: int, *, bias: bool = True, limit: float = 2e-6
) -> None:
    draw = torch.Generator().manual_seed(1)
    weight = torch.randn(OUT, IN, generator=draw)
    offset = torch.randn(OUT, generator=draw) if bias else None
    x = torch.randn(total, IN, generator=draw).requires_grad_()
    out_grad = torch.randn(total, OUT, generator=draw)
    out_grad[trained:] = 0
    flats = [adapter_group.weights.double().requires_grad_() for adapter_group in adapter_groups]
    exact_x = x.detach().double().requires_grad_()
    exact = reference(exact_x, weight, offset, adapter_groups, flats)
    exact.backward(out_grad.double())
    found = linear(x[None], weight, offset, Routing(adapter_groups, total, trained), "here")[0]
    assert distance(found, exact) < limit
    if trained:
        found.backward(out_grad)
        assert x.grad is not None
        assert exact_x.grad is not None
        assert distance(x.grad, exact_x.grad) < limit
    for adapter_group, flat in zip(adapter_groups, flats, strict=True):
        if adapter_group.grads is None or flat.grad is None:
            continue
        for mine, other in zip(adapter_group.grads, flat.grad, strict=True):
            assert distance(mine, other) < limit


def distance(one: Tensor, other: Tensor) -> float:
    one, other = one.detach(), other.detach()
    return float((one.double() - other).norm() / other.norm().clamp(min=1e-30))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.lists(st.integers(1, 9), min_size=1, max_size=4)), min_size=1, max_size=3),
    st.integers(0, 6),
    st.integers(0, 3),
    st.booleans(),
)
def test_products_and_gradients_are_those_of_each_operation_by_itself(
    groups: list[tuple[int, list[int]]], frozen: int, base: int, bias: bool
) -> None:
    """Cohorts of different ranks, then one that only goes forward, then rows without adapter."""
    adapter_groups, at = [], 0
    for seed, (rank, lengths) in enumerate(groups):
        adapter_groups.append(cohort_of(layout_of(rank), at, tuple(lengths), seed=seed))
        at = adapter_groups[-1].groups.stop
    trained = at
    if frozen:
        adapter_groups.append(cohort_of(layout_of(2), at, (frozen,), seed=77, trains=False))
        at += frozen
    check(adapter_groups, at + base, trained, bias=bias)


def test_without_a_graph_nothing_is_kept() -> None:
    adapter_group = cohort_of(layout_of(2), 0, (4, 4), seed=0, trains=False)
    check([adapter_group], 8, 0)
    with torch.no_grad():
        out = linear(torch.randn(8, IN), torch.randn(OUT, IN), None, Routing([adapter_group], 8), "here")
    assert not out.requires_grad


def test_a_place_that_nobody_adapts_is_the_base_s_product_with_a_gradient_through_it() -> None:
    layout = Layout.of([("there", Shape(2, OUT, IN, 1.0))])
    adapter_group = cohort_of(layout, 0, (8,), seed=0)
    x, weight = torch.randn(8, IN, requires_grad=True), torch.randn(OUT, IN)
    out = linear(x, weight, None, Routing([adapter_group], 8, 8), "here")
    assert torch.equal(out, torch.nn.functional.linear(x, weight))
    out.sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(8, -1))
    assert adapter_group.grads is not None
    assert not adapter_group.grads.any()


@pytest.mark.parametrize("lengths", [(8, 8, 8), (11, 11)])
def test_groups_of_one_length_have_the_bits_that_each_has_alone(lengths: tuple[int, ...]) -> None:
    layout, weight = layout_of(3), torch.randn(OUT, IN)
    together = cohort_of(layout, 0, lengths, seed=3)
    total = sum(lengths)
    x, out_grad = torch.randn(total, IN, requires_grad=True), torch.randn(total, OUT)
    fused = linear(x, weight, None, Routing([together], total, total), "here")
    fused.backward(out_grad)
    assert x.grad is not None
    assert together.grads is not None
    for number, length in enumerate(lengths):
        rows = slice(number * length, (number + 1) * length)
        alone = AdapterGroup(
            layout, Groups(0, (length,)), together.weights[number : number + 1], torch.zeros(1, layout.size)
        )
        part = x.detach()[rows].clone().requires_grad_()
        out = linear(part, weight, None, Routing([alone], length, length), "here")
        out.backward(out_grad[rows])
        assert alone.grads is not None
        assert torch.equal(out, fused[rows]), f"torch {torch.__version__}"
        assert torch.equal(part.grad, x.grad[rows]), f"torch {torch.__version__}"  # type: ignore[arg-type]
        assert torch.equal(alone.grads[0], together.grads[number]), f"torch {torch.__version__}"


def test_dropout_acts_on_what_goes_into_a_and_on_its_gradient() -> None:
    draw = torch.Generator().manual_seed(4)
    factors = (torch.rand(15, IN, generator=draw, dtype=torch.float64) < 0.5) * 2.0

    def mask(name: str, features: int, dtype: torch.dtype) -> Tensor:
        assert (name, features) == ("here", IN)
        return factors.to(dtype)

    check([cohort_of(layout_of(3), 0, (7, 8), seed=5, dropout=mask)], 15, 15)
    check([cohort_of(layout_of(3), 0, (5, 5, 5), seed=5, dropout=mask)], 15, 15)


def test_a_transposed_weight_gives_the_same_product() -> None:
    weight, x = torch.randn(OUT, IN), torch.randn(1, 9, IN, requires_grad=True)
    found = []
    for given_weight, transposed in ((weight, False), (weight.t().contiguous(), True)):
        adapter_group = cohort_of(layout_of(2), 0, (9,), seed=0)
        out = linear(x, given_weight, None, Routing([adapter_group], 9, 9), "here", transposed=transposed)
        (grad,) = torch.autograd.grad(out.square().sum(), x)
        found.append((out.detach(), grad, adapter_group.grads))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_in_bfloat16_gradients_are_kept_in_float32() -> None:
    adapter_group = cohort_of(layout_of(2), 0, (8, 8), seed=0, dtype=torch.bfloat16)
    x, weight = torch.randn(16, IN), torch.randn(OUT, IN)
    flats = adapter_group.weights.double().requires_grad_()
    exact = reference(x.bfloat16(), weight.bfloat16(), None, [adapter_group], [flats])
    exact.sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        out = linear(x.requires_grad_(), weight, None, Routing([adapter_group], 16, 16), "here")
    assert out.dtype == torch.bfloat16
    assert distance(out, exact) < 0.02
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    assert adapter_group.grads is not None
    assert flats.grad is not None
    assert adapter_group.grads.dtype == torch.float32
    assert distance(adapter_group.grads, flats.grad) < 0.02


def test_a_row_that_is_no_number_stays_in_its_group() -> None:
    for lengths in ((8, 8, 8), (5, 9, 10)):
        adapter_group = cohort_of(layout_of(2), 0, lengths, seed=0)
        adapter_group.weights[1] = math.nan
        x = torch.randn(24, IN, requires_grad=True)
        out = linear(x, torch.randn(OUT, IN), None, Routing([adapter_group], 24, 24), "here")
        out.sum().backward()
        bad = range(lengths[0], lengths[0] + lengths[1])
        assert x.grad is not None
        assert adapter_group.grads is not None
        for values in (out, x.grad):
            assert [bool(row.isfinite().all()) for row in values] == [row not in bad for row in range(24)]
        assert [bool(row.isfinite().all()) for row in adapter_group.grads] == [True, False, True]


def test_one_buffer_is_not_copied_and_several_are() -> None:
    flats = [torch.randn(5) for _ in range(3)]
    assert stack(flats[:1], torch.float32).data_ptr() == flats[0].data_ptr()
    assert torch.equal(stack(flats, torch.float32), torch.stack(flats))
    assert stack(flats[:1], torch.float64).dtype == torch.float64


def test_runs_are_where_values_stay_equal() -> None:
    assert list(runs([])) == []
    assert list(runs(["a", "a", None, "a"])) == [(0, 2), (2, 3), (3, 4)]
