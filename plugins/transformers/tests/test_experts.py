"""Products of experts with many adapters are those of a plain loop over tokens, and so are their gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twinkle.errors import Unsupported
from twinkle_transformers.lowrank import dispatch, experts
from twinkle_transformers.lowrank.dispatch import Dispatch
from twinkle_transformers.lowrank.grouped import Groups
from twinkle_transformers.lowrank.layout import Layout, Shape
from twinkle_transformers.lowrank.products import AdapterGroup, Routing

EXPERTS, WIDTH, IN, OUT = 5, 2, 16, 24


@dataclass
class Case:
    """A layer, its tokens, and adapters: ranks and lengths of the operations of each adapter group, other rows."""

    adapter_groups: Sequence[tuple[int, Sequence[int]]] = ((8, (4, 3)), (4, (5,)))
    gap: int = 2
    tail: int = 3
    trained: int | None = None
    shared: bool = True
    transposed: bool = False
    bias: bool = False
    dtype: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.total = sum(sum(lengths) + self.gap for _, lengths in self.adapter_groups) + self.tail
        self.chosen = torch.stack([torch.randperm(EXPERTS)[:WIDTH] for _ in range(self.total)])
        self.weight = torch.randn(EXPERTS, OUT, IN, dtype=self.dtype)
        self.biases = torch.randn(EXPERTS, OUT, dtype=self.dtype) if self.bias else None
        self.x = torch.randn(self.total, IN, dtype=self.dtype)
        self.g = torch.randn(self.total, WIDTH, OUT, dtype=self.dtype)
        self.rows = self.total if self.trained is None else self.trained
        self.g[self.rows :] = 0
        self.built: list[AdapterGroup] = []
        self.owners: list[tuple[Layout, Tensor, Tensor] | None] = [None] * self.total
        start = 0
        for rank, lengths in self.adapter_groups:
            layout = Layout.of([("other", Shape(rank, 3, 3, 1.0)), ("site", Shape(rank, IN, OUT, 1.7, EXPERTS))])
            flats = [torch.randn(layout.size, dtype=self.dtype) * 0.3 for _ in lengths]
            weights = torch.stack(flats)
            self.built.append(AdapterGroup(layout, Groups(start, tuple(lengths)), weights, torch.zeros_like(weights)))
            for begin, length, flat in zip(accumulate(lengths, initial=start), lengths, flats, strict=False):
                self.owners[begin : begin + length] = [(layout, flat, torch.zeros_like(flat))] * length
            start += sum(lengths) + self.gap

    def fused(self) -> tuple[Tensor, Tensor]:
        """Return outputs `[T, k, OUT]` and the gradient of x."""
        routing = Routing(self.built, self.total, self.rows)
        dispatch = Dispatch(self.chosen, EXPERTS, routing)
        x = self.x.clone().requires_grad_()
        given = x if self.shared else x.repeat_interleave(WIDTH, 0).index_select(0, dispatch.order)
        weight = self.weight.mT.contiguous() if self.transposed else self.weight
        y = experts.linear(
            given, weight, self.biases, dispatch, routing, "site", transposed=self.transposed, shared=self.shared
        )
        out = torch.empty_like(y)
        out[dispatch.order] = y
        out = out.view(self.total, WIDTH, OUT)
        if y.requires_grad:
            out.backward(self.g)
        return out.detach(), torch.zeros_like(x) if x.grad is None else x.grad

    def plain(self) -> tuple[Tensor, Tensor]:
        """Return the same by a loop over tokens; the owners' last tensors get the gradients of the adapters."""
        out, dx = torch.zeros_like(self.g), torch.zeros_like(self.x)
        for t, owner in enumerate(self.owners):
            for k, e in enumerate(self.chosen[t].tolist()):
                x, g, weight = self.x[t], self.g[t, k], self.weight[e]
                out[t, k] = weight @ x + (0 if self.biases is None else self.biases[e])
                if t < self.rows:
                    dx[t] += g @ weight
                if owner is None:
                    continue
                layout, flat, grad = owner
                entry = layout.entries["site"]
                a, b = entry.down_of(flat)[e], entry.up_of(flat)[e].t()
                out[t, k] += 1.7 * b @ (a @ x)
                dx[t] += 1.7 * (g @ b) @ a
                entry.down_of(grad)[e] += 1.7 * torch.outer(g @ b, x)
                entry.up_of(grad)[e] += 1.7 * torch.outer(a @ x, g)
        return out, dx

    def check(self, limit: float = 1e-13) -> None:
        """Compare both."""
        mine, theirs = self.fused(), self.plain()
        for ours, other in zip(mine, theirs, strict=True):
            assert (ours - other).norm() <= limit * other.norm()
        for adapter_group in self.built:
            assert adapter_group.grads is not None
            starts = accumulate(adapter_group.groups.lengths[:-1], initial=adapter_group.groups.start)
            for start, grad in zip(starts, adapter_group.grads, strict=True):
                owner = self.owners[start]
                assert owner is not None
                assert (grad - owner[2]).norm() <= limit * owner[2].norm()


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(shared=False),
        Case(transposed=True, bias=True),
        Case(bias=True, shared=False),
        Case(trained=9, adapter_groups=((4, (4, 5)),)),
        Case(trained=0),
        Case(adapter_groups=((4, (6,)),), gap=0, tail=0),
        Case(adapter_groups=((8, (1,) * 6), (2, (1, 1))), gap=0),
        Case(adapter_groups=(), tail=4),
    ],
    ids=str,
)
def test_outputs_and_gradients_are_those_of_a_loop_over_tokens(case: Case) -> None:
    if case.trained == 0:
        for adapter_group in case.built:
            adapter_group.grads = torch.zeros_like(adapter_group.weights)
        case.g.zero_()
    case.check()


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_any_shape_of_a_pass_gives_the_numbers_of_the_loop(data: Any) -> None:
    lengths = st.lists(st.integers(1, 6), min_size=1, max_size=4)
    adapter_groups = data.draw(st.lists(st.tuples(st.integers(1, 5), lengths), max_size=3))
    gap, tail = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 3))
    Case(
        adapter_groups, gap, tail + (not adapter_groups), shared=data.draw(st.booleans()), bias=data.draw(st.booleans())
    ).check()


@pytest.mark.parametrize(
    "case", [Case(dtype=torch.float32), Case(dtype=torch.float32, adapter_groups=((8, (9, 2, 4)),), gap=0)]
)
@pytest.mark.parametrize("most", [1023, 2])
def test_the_grouped_kernel_gives_the_same_numbers(case: Case, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case.__post_init__()
    for module in (experts, dispatch):
        monkeypatch.setattr(module, "has_kernel", lambda *factors: True)
    monkeypatch.setattr(dispatch, "_MOST_GROUPS", most)
    case.check(2e-6)


def test_the_grouped_kernel_leaves_rows_without_training_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (experts, dispatch):
        monkeypatch.setattr(module, "has_kernel", lambda *factors: True)
    Case(dtype=torch.float32, adapter_groups=((4, (4, 5)),), trained=9, bias=True).check(2e-6)


def test_rows_outside_what_is_trained_get_no_gradient_whatever_arrives() -> None:
    case = Case(adapter_groups=((4, (4, 5)),), trained=9)
    case.g = torch.randn_like(case.g)
    _, dx = case.fused()
    assert dx[:9].all()
    assert not dx[9:].any()


def test_weights_of_a_wider_dtype_collect_the_gradients_of_half_precision() -> None:
    case, exact = Case(dtype=torch.bfloat16), Case()
    for adapter_group in case.built:
        adapter_group.grads = torch.zeros(adapter_group.weights.shape)
    exact.__dict__ |= {key: getattr(case, key).double() for key in ("weight", "x", "g")}
    for adapter_group, other in zip(case.built, exact.built, strict=True):
        other.weights = adapter_group.weights.double()
    case.fused()
    exact.fused()
    for adapter_group, other in zip(case.built, exact.built, strict=True):
        assert adapter_group.grads is not None
        assert other.grads is not None
        assert (adapter_group.grads - other.grads).norm() < 0.02 * other.grads.norm()


def test_pieces_are_every_pair_of_a_cohort_once_and_know_expert_and_operation() -> None:
    case = Case()
    routing = Routing(case.built, case.total, case.total)
    dispatch = Dispatch(case.chosen, EXPERTS, routing)
    for adapter_group in case.built:
        found = dispatch.pieces(adapter_group)
        bounds = list(accumulate(adapter_group.groups.lengths, initial=adapter_group.groups.start))
        seen = 0
        columns = (found.experts, found.operations, found.starts, found.lengths)
        for expert, operation, start, length in zip(*columns, strict=True):
            pairs = dispatch.order[start : start + length]
            assert (case.chosen.flatten()[pairs] == expert).all()
            assert (bounds[operation] <= pairs // WIDTH).all()
            assert (pairs // WIDTH < bounds[operation + 1]).all()
            seen += length
        assert seen == sum(adapter_group.groups.lengths) * WIDTH


def test_another_number_of_tokens_and_experts_that_are_not_there_are_refused() -> None:
    routing = Routing([], 4)
    with pytest.raises(Unsupported, match=r"sees tokens \[3\] of a pass of 4"):
        Dispatch(torch.zeros(3, 2, dtype=torch.long), EXPERTS, routing)
    with pytest.raises(Unsupported, match="routed to expert 5 of 5"):
        Dispatch(torch.tensor([[0, 1], [2, 5], [0, 1], [0, 1]]), EXPERTS, routing)


def test_dropout_is_refused() -> None:
    case = Case()
    case.built[0].dropout = lambda name, size, dtype: torch.ones(7, size, dtype=dtype)
    with pytest.raises(Unsupported, match=r"lora_dropout must be 0 for adapters on experts \(site"):
        case.fused()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here; `make gpu` runs these on one")
@pytest.mark.parametrize("trained", [None, 9])
def test_half_precision_on_a_gpu_gives_the_cpus_numbers(trained: int | None) -> None:
    case = Case(dtype=torch.bfloat16, adapter_groups=((8, (4, 5)), (16, (7,))), trained=trained, gap=0, bias=True)
    on_cpu, grads = case.fused(), [adapter_group.grads for adapter_group in case.built]
    for key in ("chosen", "weight", "biases", "x", "g"):
        setattr(case, key, getattr(case, key).cuda())
    for adapter_group in case.built:
        adapter_group.weights, adapter_group.grads = (
            adapter_group.weights.cuda(),
            torch.zeros(adapter_group.weights.shape, device="cuda"),
        )
    on_gpu = case.fused()
    for mine, theirs in zip(on_gpu, on_cpu, strict=True):
        assert (mine.cpu().float() - theirs.float()).norm() < 0.02 * theirs.float().norm()
    for adapter_group, theirs in zip(case.built, grads, strict=True):
        assert adapter_group.grads is not None
        assert theirs is not None
        assert (adapter_group.grads.cpu() - theirs.float()).norm() < 0.02 * theirs.float().norm()
