"""Optimizers, schedulers, kernels, patches and processors: each check catches what is broken in that way."""

import random
from typing import Any

import pytest
import torch
from broken import Broken, after, broken, changed

from twinkle.patch import Patch
from twinkle.processor import InputProcessor


class Descent(torch.optim.Optimizer):
    """Gradient descent with momentum."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.move(parameter, group["lr"])

    def move(self, parameter: Any, lr: float) -> None:
        state = self.state[parameter]
        state["momentum"] = 0.5 * state.get("momentum", 0.0) + parameter.grad
        parameter.data.add_(state["momentum"], alpha=-lr)


class Halving(torch.optim.lr_scheduler.LRScheduler):
    """Half the rate with each step."""

    def get_lr(self) -> list[float]:
        return [base * self.factor(self.last_epoch) for base in self.base_lrs]

    def factor(self, step: int) -> float:
        return 0.5**step


class Scaled:
    """`x * tanh(x)`, as one function."""

    def __call__(self, x: Any) -> Any:
        return x * x.tanh()


def reference(x: Any) -> Any:
    return x * torch.tanh(x)


class Layer(torch.nn.Module):
    """What is patched."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.width = 3

    def forward(self, x: Any) -> Any:
        return self.linear(x)


def layer() -> Layer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Layer()


class Doubled(Patch):
    """Doubles the forward of one module."""

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        if "forward" not in vars(module):
            forward = module.forward
            module.forward = lambda x: 2 * forward(x)
        return module

    def unpatch(self, module: Any, *args: Any, **kwargs: Any) -> None:
        vars(module).pop("forward", None)


class Careless(Doubled):
    """Leaves something behind."""

    def unpatch(self, module: Any, *args: Any, **kwargs: Any) -> None:
        super().unpatch(module)
        module.width = 4


class ForAll(Doubled):
    """Changes every object's own attribute."""

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        for other in LAYERS:
            other.width = 5
        return super().__call__(module)

    def unpatch(self, module: Any, *args: Any, **kwargs: Any) -> None:
        super().unpatch(module)
        for other in LAYERS:
            other.width = 3


class Counting(Doubled):
    """Gives other numbers each time that it is applied."""

    times = 0

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        type(self).times += 1
        forward, factor = module.forward, self.times
        module.forward = lambda x: factor * forward(x)
        return module


class Idle(Doubled):
    """Changes nothing."""

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        return module


LAYERS: list[Layer] = []


def tracked() -> Layer:
    LAYERS.append(layer())
    return LAYERS[-1]


def backwards(self: Any, parameter: Any, lr: float) -> None:
    """Climb."""
    parameter.data.add_(parameter.grad, alpha=lr)


def noisy(self: Any, parameter: Any, lr: float) -> None:
    """Add noise."""
    parameter.data.add_(parameter.grad + torch.randn(parameter.shape), alpha=-lr)


def fixed_rate(self: Any, parameter: Any, lr: float) -> None:
    """Use the rate that it began with."""
    parameter.data.add_(parameter.grad, alpha=-0.01)


def forgetful(self: Any, parameter: Any, lr: float) -> None:
    """Keep the momentum where no state is saved."""
    held = self.__dict__.setdefault("held", {})
    held[parameter] = 0.5 * held.get(parameter, 0.0) + parameter.grad
    parameter.data.add_(held[parameter], alpha=-lr)


def decays_all(self: Any, closure: Any = None) -> None:
    """Decay parameters that have no gradient too."""
    for group in self.param_groups:
        for parameter in group["params"]:
            parameter.data.mul_(0.9)


def moving_scheduler(self: Any) -> list[float]:
    """Change a parameter."""
    self.optimizer.param_groups[0]["params"][0].data.add_(1)
    return list(self.base_lrs)


class Stateless(Halving):
    """Forgets in its state how far it is."""

    def load_state_dict(self, state_dict: Any) -> None:
        return


class OtherLast(Halving):
    """Says other rates than it sets."""

    def get_last_lr(self) -> list[float]:
        return [0.0 for _ in self.base_lrs]


def truncated(batch: Any) -> Any:
    return {**batch, "input_ids": batch["input_ids"].clamp(max=20)}


def relabelled(batch: Any) -> Any:
    return {**batch, "labels": batch["labels"].masked_fill(batch["attention_mask"] == 0, 0)}


def counted_on(batch: Any) -> Any:
    return {**batch, "position_ids": batch["position_ids"] + 1}


def containers(self: Any, inputs: Any, **kwargs: Any) -> Any:
    """Read lists only."""
    rows = inputs if isinstance(inputs, list) else [inputs]
    made = InputProcessor.__call__(self, rows)
    return made if isinstance(rows[0]["input_ids"], list) else {**made, "labels": made["labels"] * 0}


def emptied(self: Any, inputs: Any, **kwargs: Any) -> Any:
    """Empty the rows."""
    made = InputProcessor.__call__(self, inputs)
    for row in inputs:
        row.clear()
    return made


def lenient(self: Any, inputs: Any, **kwargs: Any) -> Any:
    """Make something of anything."""
    return InputProcessor.__call__(self, inputs) if inputs else {}


def in_place(self: Any, x: Any) -> Any:
    """Write into the argument."""
    found = reference(x)
    if not x.requires_grad:
        x.zero_()
    return found


def flat(self: Any, x: Any) -> Any:
    """Read memory as if it were contiguous."""
    return reference(torch.as_strided(x, x.shape, torch.empty(x.shape).stride()))


def forward_only(self: Any, x: Any) -> Any:
    """Have no gradient of its own."""
    return reference(x.detach()) + 0 * x


VALUES = {"reference": reference, "arguments": lambda: [torch.linspace(-2, 2, 12).reshape(3, 4)]}
MODULE = {"module": layer, "inputs": lambda: {"x": torch.ones(2, 3)}, "same_numbers": False}
unpicklable = {"__init__": lambda self: (InputProcessor.__init__(self), setattr(self, "held", lambda: 1))[0]}
GOOD: dict[str, Broken] = {
    "optimizer": broken(Descent),
    "scheduler": broken(Halving, rates=(1.0, 0.5, 0.25)),
    "kernel": broken(Scaled, **VALUES, dtypes=("float32", "bfloat16")),
    "patch": broken(Doubled, **MODULE),
    "processor": broken(InputProcessor),
}
BROKEN: dict[tuple[str, str], Broken] = {
    ("optimizer", "protocol"): broken(changed(Descent, state_dict=None)),
    ("optimizer", "improves"): broken(changed(Descent, move=backwards)),
    ("optimizer", "zero_grad"): broken(changed(Descent, zero_grad=lambda self: None)),
    ("optimizer", "round_trip"): broken(changed(Descent, move=forgetful)),
    ("optimizer", "without_gradient"): broken(changed(Descent, step=decays_all)),
    ("optimizer", "learning_rate"): broken(changed(Descent, move=fixed_rate)),
    ("optimizer", "deterministic"): broken(changed(Descent, move=noisy)),
    ("scheduler", "protocol"): broken(OtherLast),
    ("scheduler", "finite"): broken(changed(Halving, factor=lambda self, step: 1.0 - step / 10)),
    ("scheduler", "expected_rates"): broken(Halving, rates=(1.0, 0.9)),
    ("scheduler", "round_trip"): broken(Stateless),
    ("scheduler", "only_rates"): broken(changed(Halving, get_lr=moving_scheduler)),
    ("kernel", "numbers"): broken(after(Scaled, lambda found: found * 1.01), **VALUES),
    ("kernel", "gradients"): broken(changed(Scaled, __call__=forward_only), **VALUES),
    ("kernel", "any_layout"): broken(changed(Scaled, __call__=flat), **VALUES),
    ("kernel", "arguments_left_alone"): broken(changed(Scaled, __call__=in_place), **VALUES),
    ("kernel", "deterministic"): broken(after(Scaled, lambda found: found + random.random()), **VALUES),
    ("patch", "undone"): broken(Careless, **MODULE),
    ("patch", "changes_something"): broken(Idle, **MODULE),
    ("patch", "twice_is_once"): broken(changed(Careless, unpatch=Careless.unpatch), **MODULE),
    ("patch", "again"): broken(Counting, **MODULE),
    ("patch", "undone_after_error"): broken(Careless, **MODULE),
    ("patch", "numbers_kept"): broken(Doubled, **{**MODULE, "same_numbers": True}),
    ("patch", "others_left_alone"): broken(ForAll, **{**MODULE, "module": tracked}),
    ("processor", "shapes"): broken(after(InputProcessor, lambda batch: {**batch, "labels": batch["labels"].float()})),
    ("processor", "tokens_kept"): broken(after(InputProcessor, truncated)),
    ("processor", "padding_trains_nothing"): broken(after(InputProcessor, relabelled)),
    ("processor", "positions"): broken(after(InputProcessor, counted_on)),
    ("processor", "any_container"): broken(changed(InputProcessor, __call__=containers)),
    ("processor", "rides_along"): broken(after(InputProcessor, lambda batch: {**batch, "user_data": None})),
    ("processor", "rows_left_alone"): broken(changed(InputProcessor, __call__=emptied)),
    ("processor", "bad_rows_refused"): broken(changed(InputProcessor, __call__=lenient)),
    ("processor", "pickle"): broken(changed(InputProcessor, **unpicklable)),
}


@pytest.mark.parametrize("kind", GOOD)
def test_a_good_one_passes(kind: str, passes: Any) -> None:
    passes(kind, GOOD[kind].component, **GOOD[kind].example)


@pytest.mark.parametrize(("kind", "check"), BROKEN)
def test_a_broken_one_is_caught(kind: str, check: str, catches: Any) -> None:
    component, example = BROKEN[kind, check]
    catches(kind, check, component, **example)


@pytest.mark.parametrize("kind", GOOD)
def test_every_check_has_a_component_that_breaks_it(kind: str, own_checks: Any) -> None:
    assert {check for of, check in BROKEN if of == kind} == own_checks(kind)
