"""Contract checks of schedulers: torch's protocol, finite rates >= 0, and state that resumes exactly."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from twinkle_testing.contracts.case import Case, require
from twinkle_testing.contracts.values import same, shown

_HALF = 7


@dataclass(kw_only=True)
class SchedulerCase(Case):
    """A scheduler and the optimizer whose rates it changes.

    Attributes:
        make: takes an optimizer and returns the scheduler, if it is not built as `cls(optimizer, **kwargs)`.
        optimizer: takes parameter groups and returns an optimizer; by default AdamW.
        step_arguments: arguments of `step`, such as the metric of `ReduceLROnPlateau`.
        rates: the expected learning rates after 0, 1, 2, ... steps as fractions of the base rate, if known.
    """

    kind = "scheduler"

    make: Callable[[Any], Any] | None = None
    optimizer: Callable[[Any], Any] | None = None
    step_arguments: Sequence[Any] = ()
    rates: Sequence[float] = ()

    def base(self) -> Any:
        """Return an optimizer of two groups, with rates of 1.0 and 0.5."""
        import torch

        groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": rate} for rate in (1.0, 0.5)]
        return self.optimizer(groups) if self.optimizer else torch.optim.AdamW(groups)

    def on(self, optimizer: Any) -> Any:
        """Return the scheduler of an optimizer."""
        return self.make(optimizer) if self.make else self.component(optimizer, **self.kwargs)

    def build(self, **more: Any) -> Any:
        """Return the scheduler of a fresh optimizer."""
        return self.on(self.base()) if self.make else self.component(self.base(), **{**self.kwargs, **more})


def walk(case: SchedulerCase, scheduler: Any, optimizer: Any, steps: int) -> list[list[float]]:
    """Return the learning rates of the groups before the first and after each of `steps` steps."""
    rates = [_rates(optimizer)]
    for _ in range(steps):
        optimizer.step()
        scheduler.step(*case.step_arguments)
        rates.append(_rates(optimizer))
    return rates


def protocol(case: SchedulerCase) -> None:
    """It has `step`, `state_dict` and `load_state_dict`, and `get_last_lr` returns one rate per group."""
    optimizer = case.base()
    scheduler = case.on(optimizer)
    for name in ("step", "state_dict", "load_state_dict", "get_last_lr"):
        require(callable(getattr(scheduler, name, None)), f"it has no method {name}()")
    walk(case, scheduler, optimizer, 1)
    found = [float(rate) for rate in scheduler.get_last_lr()]
    require(same(found, _rates(optimizer)), f"get_last_lr() gives {found}, the optimizer has {_rates(optimizer)}")


def finite(case: SchedulerCase) -> None:
    """Rates are finite and at least 0, also long after its last planned step."""
    optimizer = case.base()
    scheduler = case.on(optimizer)
    try:
        found = walk(case, scheduler, optimizer, 60)
    except ValueError as error:
        require("step" in str(error), f"within 60 steps it raised: {error}")
        return
    for step, rates in enumerate(found):
        fine = all(math.isfinite(rate) and rate >= 0 for rate in rates)
        require(fine, f"after {step} steps the rates are {rates}")


def expected_rates(case: SchedulerCase) -> None:
    """All groups have the same factor of their base rate; the factors equal the expected ones, if given."""
    optimizer = case.base()
    scheduler = case.on(optimizer)
    found = walk(case, scheduler, optimizer, max(len(case.rates) - 1, _HALF))
    if case.rates:
        factors = [rates[0] for rates in found[: len(case.rates)]]
        wanted = [float(rate) for rate in case.rates]
        require(same(factors, wanted, tolerance=1e-6), f"the rates are {shown(factors)}; expected are {shown(wanted)}")


def round_trip(case: SchedulerCase) -> None:
    """With its state loaded into a new one, the rates continue unchanged, also through a file."""
    import torch

    optimizer = case.base()
    whole = walk(case, case.on(optimizer), optimizer, 2 * _HALF)
    first = case.base()
    scheduler = case.on(first)
    walk(case, scheduler, first, _HALF)
    file = case.folder / "scheduler.pt"
    torch.save({"scheduler": scheduler.state_dict(), "optimizer": first.state_dict()}, file)
    saved = torch.load(file, weights_only=False)
    second = case.base()
    again = case.on(second)
    second.load_state_dict(saved["optimizer"])
    again.load_state_dict(saved["scheduler"])
    found = walk(case, again, second, _HALF)
    require(
        same(found, whole[_HALF:], tolerance=1e-9),
        f"after a resume the rates are {shown(found)}, not {shown(whole[_HALF:])}",
    )


def only_rates(case: SchedulerCase) -> None:
    """It does not change parameters."""
    optimizer = case.base()
    scheduler = case.on(optimizer)
    for _ in range(3):
        optimizer.step()
        scheduler.step(*case.step_arguments)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            require(bool((parameter == 1).all()), f"a parameter became {parameter.detach().tolist()}")


CASE = SchedulerCase
CHECKS = (protocol, finite, expected_rates, round_trip, only_rates)


def _rates(optimizer: Any) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]
