"""One call over many flat buffers gives each optimizer the numbers of its own division, clipping and `step()`."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.optim.optimizer import register_optimizer_step_post_hook

from twinkle.errors import ArgumentError
from twinkle_transformers import flat_step
from twinkle_transformers.flat_step import clip_and_step, measure

SIZES = (1, 7, 64, 1003, 9001)
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1},
    {"amsgrad": True},
    {"maximize": True},
    {"weight_decay": 0.0},
)


def noise(size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def tenant(size: int, seed: int = 0, cls: type[Adam] = AdamW, **options: Any) -> Optimizer:
    return cls([nn.Parameter(noise(size, seed))], **{"fused": True, **options})


def flat(optimizer: Optimizer) -> nn.Parameter:
    found = optimizer.param_groups[0]["params"][0]
    assert isinstance(found, nn.Parameter)
    return found


def give(optimizers: list[Optimizer], round_: int, size: float = 1.0) -> None:
    for index, optimizer in enumerate(optimizers):
        parameter = flat(optimizer)
        parameter.grad = noise(parameter.numel(), 1000 * round_ + index).to(parameter.dtype) * size


def everything(optimizer: Optimizer) -> dict[str, Tensor]:
    parameter = flat(optimizer)
    return {"weights": parameter.detach().clone(), **{k: v.clone() for k, v in optimizer.state[parameter].items()}}


def assert_same(ours: Optimizer, theirs: Optimizer) -> None:
    mine, other = everything(ours), everything(theirs)
    assert mine.keys() == other.keys()
    for name in mine:
        assert torch.equal(mine[name], other[name]), name


def by_itself(optimizer: Optimizer, denominator: float, max_norm: float) -> float:
    """The definition, for one optimizer: its own division, clipping and step."""
    parameter = flat(optimizer)
    assert parameter.grad is not None
    norm = float(parameter.grad.double().norm()) / denominator
    divisor = denominator * max(1.0, norm / max_norm if max_norm > 0 else 0.0)
    parameter.grad = parameter.grad / divisor
    optimizer.step()
    return norm


def calls(monkeypatch: pytest.MonkeyPatch, name: str = "_fused_adamw_") -> list[int]:
    """Note how many tensors each call of a kernel gets."""
    seen: list[int] = []
    kernel = getattr(torch, name)

    def counted(params: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(len(params))
        return kernel(params, *args, **kwargs)

    monkeypatch.setattr(torch, name, counted)
    return seen


# --- what is updated ---


@pytest.mark.parametrize("cls", [Adam, AdamW])
@pytest.mark.parametrize("options", OPTIONS)
def test_many_at_once_are_each_divided_clipped_and_stepped(options: dict[str, Any], cls: type[Adam]) -> None:
    ours = [tenant(size, seed, cls, **options) for seed, size in enumerate(SIZES)]
    theirs = [tenant(size, seed, cls, **options) for seed, size in enumerate(SIZES)]
    for round_ in range(4):
        denominators, bounds = [3.0 + round_, 1.0, 128.0, 7.0, 0.5], [0.5, 0.0, 1e-3, 1e9, 1.0]
        give(ours, round_)
        give(theirs, round_)
        norms = clip_and_step(ours, denominators, bounds)
        alone = [by_itself(*item) for item in zip(theirs, denominators, bounds, strict=True)]
        assert norms.tolist() == pytest.approx(alone, rel=1e-6)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(everything(mine), everything(other), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("cls", [Adam, AdamW])
@pytest.mark.parametrize("options", OPTIONS)
def test_the_update_is_bit_equal_to_step_after_the_same_division(options: dict[str, Any], cls: type[Adam]) -> None:
    ours = [tenant(size, seed, cls, **options) for seed, size in enumerate(SIZES)]
    theirs = [tenant(size, seed, cls, **options) for seed, size in enumerate(SIZES)]
    for round_ in range(4):
        give(ours, round_)
        clip_and_step(ours, [3.0] * 5, [0.5] * 5)
        for mine, other in zip(ours, theirs, strict=True):
            flat(other).grad = flat(mine).grad
            other.step()
            assert_same(mine, other)


def test_the_gradient_left_behind_is_the_divided_and_clipped_one() -> None:
    one, other = tenant(1003), tenant(50)
    give([one, other], 0)
    raw = [flat(one).grad.double().clone(), flat(other).grad.double().clone()]  # type: ignore[union-attr]
    norms = clip_and_step([one, other], [4.0, 8.0], [1.0, 0.0])
    wanted = raw[0] / raw[0].norm()
    torch.testing.assert_close(flat(one).grad.double(), wanted, rtol=1e-6, atol=1e-9)  # type: ignore[union-attr]
    torch.testing.assert_close(flat(other).grad.double(), raw[1] / 8, rtol=1e-6, atol=1e-9)  # type: ignore[union-attr]
    assert norms.tolist() == pytest.approx([(raw[0] / 4).norm().item(), (raw[1] / 8).norm().item()], rel=1e-6)


def test_numbers_are_those_of_the_plain_form_in_float64() -> None:
    steps, denominator, bound = 10, 5.0, 0.7
    ours = tenant(1003, lr=1e-2)
    plain = nn.Parameter(noise(1003, 0).double())
    reference = AdamW([plain], lr=1e-2, foreach=False, fused=False)
    for round_ in range(steps):
        give([ours], round_)
        assert flat(ours).grad is not None
        plain.grad = flat(ours).grad.double() / denominator  # type: ignore[union-attr]
        nn.utils.clip_grad_norm_([plain], bound)
        clip_and_step([ours], [denominator], [bound])
        reference.step()
    assert (flat(ours) - plain).norm() <= 1e-6 * plain.norm()


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 40),
            st.sampled_from((1e-3, 1e-2)),
            st.sampled_from((0.0, 1.0, 3.0)),
            st.sampled_from((-1.0, 0.0, 0.1, 10.0)),
            st.booleans(),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_company_changes_nothing(drawn: list[tuple[int, float, float, float, bool]]) -> None:
    together = [tenant(size, i, lr=lr) for i, (size, lr, _, _, _) in enumerate(drawn)]
    apart = [tenant(size, i, lr=lr) for i, (size, lr, _, _, _) in enumerate(drawn)]
    for round_ in range(3):
        for group in (together, apart):
            give(group, round_)
            for optimizer, (*_, spoiled) in zip(group, drawn, strict=True):
                if spoiled and round_ == 1:
                    flat(optimizer).grad[0] = math.nan  # type: ignore[index]
        fused = clip_and_step(together, [d for _, _, d, _, _ in drawn], [b for _, _, _, b, _ in drawn])
        for index, (optimizer, (_, _, denominator, bound, _)) in enumerate(zip(apart, drawn, strict=True)):
            norm = clip_and_step([optimizer], [denominator], [bound])
            assert torch.equal(norm.nan_to_num(-1.0), fused[index : index + 1].nan_to_num(-1.0))
            assert_same(together[index], optimizer)


# --- how many calls ---


def test_equal_options_share_one_kernel_call_and_others_have_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizers = [tenant(9, i, lr=1e-3 if i < 5 else 1e-2) for i in range(8)]
    give(optimizers, 0)
    clip_and_step(optimizers, [1.0] * 8, [1.0] * 8)  # torch makes the state in a first step of its own
    seen = calls(monkeypatch)
    clip_and_step(optimizers, [1.0] * 8, [1.0] * 8)
    assert sorted(seen) == [3, 5]


# --- what must not be updated ---


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("stepped", [False, True])
def test_a_gradient_that_is_not_finite_leaves_its_own_optimizer_alone(odd: float, stepped: bool) -> None:
    optimizers = [tenant(100, i) for i in range(3)]
    if stepped:
        give(optimizers, 0)
        clip_and_step(optimizers, [1.0] * 3, [1.0] * 3)
    give(optimizers, 1)
    flat(optimizers[1]).grad[50] = odd  # type: ignore[index]
    before = [everything(optimizer) for optimizer in optimizers]
    norms = clip_and_step(optimizers, [2.0] * 3, [1.0] * 3)
    assert norms.isfinite().tolist() == [True, False, True]
    after = everything(optimizers[1])
    assert after.keys() == before[1].keys()
    assert all(torch.equal(after[name], before[1][name]) for name in after)
    for index in (0, 2):
        assert not torch.equal(flat(optimizers[index]), before[index]["weights"])


@pytest.mark.parametrize("denominator", [math.nan, math.inf, 1e-45])
def test_a_denominator_that_cannot_divide_leaves_the_optimizer_alone(denominator: float) -> None:
    optimizer = tenant(5)
    give([optimizer], 0)
    before = flat(optimizer).detach().clone()
    assert not clip_and_step([optimizer], [denominator], [1.0]).isfinite()
    assert torch.equal(flat(optimizer), before)


@pytest.mark.parametrize("denominator", [0.0, -2.0])
@pytest.mark.parametrize("odd", [1.0, math.nan])
def test_a_denominator_of_zero_is_a_step_with_a_zero_gradient(denominator: float, odd: float) -> None:
    ours, theirs = tenant(5), tenant(5)
    for optimizer in (ours, theirs):
        give([optimizer], 0)
        optimizer.step()
        give([optimizer], 1)
    flat(ours).grad[0] = odd  # type: ignore[index]
    assert clip_and_step([ours], [denominator], [1.0]).tolist() == [0.0]
    flat(theirs).grad.zero_()  # type: ignore[union-attr]
    theirs.step()
    assert_same(ours, theirs)


def test_an_optimizer_without_a_gradient_does_nothing() -> None:
    empty, other = tenant(5), tenant(5)
    give([other], 0)
    before = flat(empty).detach().clone()
    assert clip_and_step([empty, other], [1.0, 1.0], [1.0, 1.0])[0] == 0
    assert torch.equal(flat(empty), before)
    assert not empty.state[flat(empty)]


def test_no_optimizers_have_no_norms() -> None:
    assert clip_and_step([], [], []).shape == (0,)
    assert clip_and_step([tenant(3), tenant(3)], [1.0, 0.0], [1.0, 1.0]).tolist() == [0.0, 0.0]
    assert measure([]).shape == (0,)


# --- what only the device knows: the form of CUDA, run on the host's kernel ---


def queued(optimizers: list[Optimizer], denominators: list[float], bounds: list[float]) -> Tensor:
    tenants = flat_step._tenants(optimizers, denominators, bounds)
    plan = flat_step._Plan.of(tenants)
    with torch.no_grad():
        flat_step._step_queued(tenants, plan, range(len(tenants)))
    return plan.norms


@pytest.mark.parametrize("cls", [Adam, AdamW])
@pytest.mark.parametrize("options", OPTIONS)
def test_norms_that_stay_on_the_device_give_the_same_bits(options: dict[str, Any], cls: type[Adam]) -> None:
    ours = [tenant(size, seed, cls, **options) for seed, size in enumerate(SIZES)]
    theirs = [tenant(size, seed, cls, **options) for seed, size in enumerate(SIZES)]
    denominators, bounds = [3.0, 1.0, 0.0, 7.0, 0.5], [0.5, 0.0, 1e-3, 1e9, 1.0]
    for round_ in range(4):
        give(ours, round_)
        give(theirs, round_)
        if round_ == 2:
            flat(ours[1]).grad[0] = flat(theirs[1]).grad[0] = math.nan  # type: ignore[index]
        function: Callable[..., Tensor] = queued if round_ else clip_and_step
        mine, other = function(ours, denominators, bounds), clip_and_step(theirs, denominators, bounds)
        assert torch.equal(mine.nan_to_num(-1.0), other.nan_to_num(-1.0))
        for pair in zip(ours, theirs, strict=True):
            assert_same(*pair)


@pytest.mark.gpu
def test_cuda_steps_without_waiting_and_gives_the_numbers_of_the_host() -> None:
    def made(device: str) -> list[Optimizer]:
        return [AdamW([nn.Parameter(noise(size, i).to(device))], fused=True) for i, size in enumerate(SIZES)]

    ours, theirs = made("cuda"), made("cpu")
    for round_ in range(4):
        give(theirs, round_)
        if round_ == 2:
            flat(theirs[3]).grad[5] = math.inf  # type: ignore[index]
        for mine, other in zip(ours, theirs, strict=True):
            flat(mine).grad = flat(other).grad.cuda()  # type: ignore[union-attr]
        torch.cuda.set_sync_debug_mode("error" if round_ else "default")
        try:
            norms = clip_and_step(ours, [3.0] * 5, [0.5] * 5)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(norms.cpu(), clip_and_step(theirs, [3.0] * 5, [0.5] * 5), rtol=1e-6, atol=0)
    for mine, other in zip(ours, theirs, strict=True):
        moved = {name: value.cpu() for name, value in everything(mine).items()}
        torch.testing.assert_close(moved, everything(other), rtol=1e-5, atol=1e-7)


# --- torch's own machinery around a step ---


def test_schedulers_follow_without_a_warning_and_change_the_next_step() -> None:
    ours, theirs = tenant(50, lr=0.1), tenant(50, lr=0.1)
    schedulers = [LambdaLR(optimizer, lambda step: 0.5**step) for optimizer in (ours, theirs)]
    for round_ in range(4):
        give([ours], round_)
        clip_and_step([ours], [1.0], [0.0])
        flat(theirs).grad = flat(ours).grad
        theirs.step()
        for scheduler in schedulers:
            scheduler.step()  # warns, hence fails, where no step was noticed
        assert_same(ours, theirs)
    assert ours.param_groups[0]["lr"] == 0.1 * 0.5**4


def test_a_scheduler_set_after_steps_notices_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = tenant(50)
    give([optimizer], 0)
    clip_and_step([optimizer], [1.0], [0.0])
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=10)  # moves the betas too
    seen = calls(monkeypatch)
    for _ in range(3):
        clip_and_step([optimizer], [1.0], [0.0])
        scheduler.step()
    assert seen == [1, 1, 1]
    assert everything(optimizer)["step"] == 4


def test_state_dict_travels_to_and_from_an_ordinary_optimizer() -> None:
    ours = tenant(50)
    for round_ in range(2):
        give([ours], round_)
        clip_and_step([ours], [1.0], [1.0])
    theirs = AdamW([nn.Parameter(flat(ours).detach().clone())])
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    again = tenant(50)
    with torch.no_grad():
        flat(again).copy_(flat(ours))
    again.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for optimizer in (ours, again):
        give([optimizer], 2)
        clip_and_step([optimizer], [1.0], [1.0])
    assert_same(ours, again)


def test_hooks_run_and_see_the_divided_gradient() -> None:
    hooked, other = tenant(4), tenant(4)
    seen: list[Any] = []
    hooked.register_step_pre_hook(lambda optimizer, *_: seen.append(flat(optimizer).grad.clone()))  # type: ignore[union-attr]
    hooked.register_step_post_hook(lambda *_: seen.append("after"))
    for _ in range(2):
        for optimizer in (hooked, other):
            flat(optimizer).grad = torch.full((4,), 6.0)
        clip_and_step([hooked, other], [3.0, 3.0], [0.0, 0.0])
    assert [item if isinstance(item, str) else item.tolist() for item in seen] == [[2.0] * 4, "after"] * 2
    assert_same(hooked, other)


def test_hooks_on_all_optimizers_run() -> None:
    optimizer = tenant(4)
    seen: list[int] = []
    handle = register_optimizer_step_post_hook(lambda *_: seen.append(1))
    try:
        for _ in range(3):
            give([optimizer], 0)
            clip_and_step([optimizer], [1.0], [0.0])
    finally:
        handle.remove()
    assert seen == [1, 1, 1]


def test_a_step_that_someone_replaced_is_the_one_that_runs() -> None:
    optimizer = tenant(4)
    give([optimizer], 0)
    clip_and_step([optimizer], [1.0], [0.0])
    seen: list[int] = []
    optimizer.step = lambda: seen.append(1)  # type: ignore[method-assign, assignment, misc, return-value]
    clip_and_step([optimizer], [1.0], [0.0])
    assert seen == [1]


class HalfAdamW(AdamW):
    """A subclass whose step is its own."""

    def step(self, closure: Any = None) -> None:
        flat(self).grad *= 0.5
        super().step(closure)


@pytest.mark.parametrize(
    "build",
    [
        lambda p: HalfAdamW([p], fused=True),
        lambda p: AdamW([p], fused=False),
        lambda p: AdamW([p], lr=torch.tensor(1e-2), fused=True),
        lambda p: torch.optim.SGD([p], lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adafactor([p]),
        lambda p: torch.optim.NAdam([p]),
    ],
)
def test_other_optimizers_take_their_own_step(build: Callable[[nn.Parameter], Optimizer]) -> None:
    ours, theirs = (build(nn.Parameter(noise(30, 0))) for _ in range(2))
    beside = tenant(30)
    for round_ in range(3):
        give([ours, beside], round_)
        give([theirs], round_)
        clip_and_step([ours, beside], [4.0, 4.0], [0.0, 0.0])
        flat(theirs).grad /= 4.0  # type: ignore[operator]
        theirs.step()
        assert torch.equal(flat(ours), flat(theirs))


class BrokenSGD(torch.optim.SGD):
    """Fails in its step."""

    def step(self, closure: Any = None) -> None:
        raise ZeroDivisionError


def test_a_step_that_fails_is_told_after_all_others_were_made() -> None:
    broken, usual, slow = BrokenSGD([nn.Parameter(noise(5, 0))]), tenant(5), tenant(5, fused=False)
    before = flat(usual).detach().clone()
    give([broken, usual, slow], 0)
    with pytest.raises(ExceptionGroup) as caught:
        clip_and_step([broken, usual, slow], [1.0] * 3, [0.0] * 3)
    assert [(type(error), error.__notes__) for error in caught.value.exceptions] == [
        (ZeroDivisionError, ["clip_and_step: optimizer 0, a BrokenSGD"])
    ]
    assert not torch.equal(flat(usual), before)
    assert not torch.equal(flat(slow), before)


def test_an_optimizer_over_several_tensors_is_clipped_by_their_joint_norm() -> None:
    pieces = [nn.Parameter(noise(size, size)) for size in (3, 5)]
    optimizer = AdamW(pieces, fused=True)
    for piece in pieces:
        piece.grad = torch.ones_like(piece)
    norm = clip_and_step([optimizer, other := tenant(4)], [2.0, 1.0], [0.1, 1.0])
    assert norm.tolist() == pytest.approx([math.sqrt(8) / 2, 0.0])
    assert torch.cat([piece.grad for piece in pieces]).norm().item() == pytest.approx(0.1)  # type: ignore[misc]
    assert not other.state


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_buffers_of_other_dtypes_take_their_own_step(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    odd, twin = (AdamW([nn.Parameter(noise(20, 0).to(dtype))], fused=True) for _ in range(2))
    usual = tenant(20)
    seen = calls(monkeypatch)
    for round_ in range(2):
        give([odd, usual], round_)
        norms = clip_and_step([odd, usual], [1.0, 1.0], [0.1, 0.1])
        flat(twin).grad = flat(odd).grad
        twin.step()
        assert_same(odd, twin)
    assert norms.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert max(seen) == 1


# --- bad input ---


@pytest.mark.parametrize(
    ("denominators", "bounds", "text"),
    [
        ([1.0], [1.0, 1.0], "2 optimizers, 1 denominators and 2 max_norms"),
        ([1.0, 1.0], [1.0], "1 max_norms"),
        ([1.0, 1.0], [1.0, math.nan], "max_norm must be a number .* got nan"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_anything_changes(
    denominators: list[float], bounds: list[float], text: str
) -> None:
    optimizers = [tenant(3), tenant(4)]
    give(optimizers, 0)
    before = [everything(optimizer) for optimizer in optimizers]
    with pytest.raises(ArgumentError, match=text):
        clip_and_step(optimizers, denominators, bounds)
    for optimizer, state in zip(optimizers, before, strict=True):
        torch.testing.assert_close(everything(optimizer), state, rtol=0, atol=0)


def test_one_optimizer_twice_is_refused() -> None:
    optimizer = tenant(3)
    with pytest.raises(ArgumentError, match="named twice"):
        clip_and_step([optimizer, optimizer], [1.0, 1.0], [1.0, 1.0])


def test_gradients_of_two_devices_are_refused() -> None:
    here, there = tenant(3), AdamW([nn.Parameter(torch.zeros(3, device="meta"))])
    give([here], 0)
    flat(there).grad = torch.zeros(3, device="meta")
    with pytest.raises(ArgumentError, match="cpu, meta"):
        clip_and_step([here, there], [1.0, 1.0], [1.0, 1.0])
