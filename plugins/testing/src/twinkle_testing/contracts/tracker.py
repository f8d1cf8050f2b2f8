"""Contract checks of trackers: hooks, complete records, NaN, resumed runs, an end without a start."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twinkle_testing.contracts.case import Case, NotApplicable, Violation, require
from twinkle_testing.contracts.values import left_alone, same

NUMBERS = {"loss": 2.5, "accuracy": 0.25, "learning_rate": 1e-4, "tokens": 12, "eval/loss": 2.25}
_HOOKS = (
    "twinkle_run_start",
    "twinkle_step_end",
    "twinkle_checkpoint_saved",
    "twinkle_run_error",
    "twinkle_run_end",
)


@dataclass(kw_only=True)
class TrackerCase(Case):
    """A tracker and a function that reads its records.

    Attributes:
        read: takes the run's folder and returns `{step: {name: number}}` as recorded there; None if the tracker
            writes elsewhere. Numbers that are not finite may be missing or None.
    """

    kind = "tracker"

    read: Callable[[Path], Mapping[int, Mapping[str, Any]]] | None = None
    _runs: int = field(default=0, init=False, repr=False)

    def run(self) -> Any:
        """Return a run in a new folder, which calls no hooks by itself."""
        from twinkle.run import Run

        self._runs += 1
        return Run(f"contract-{self._runs}", root=self.folder)

    def recorded(self, run: Any) -> Mapping[int, Mapping[str, Any]]:
        """Return the records in the run's folder."""
        if self.read is None:
            raise NotApplicable("its example gives no read=, a function of the run's folder that gives {step: numbers}")
        return self.read(run.folder)


def fire(tracker: Any, hook: str, **arguments: Any) -> None:
    """Call a hook of the tracker with the arguments that the method declares, like pluggy."""
    method = getattr(tracker, hook, None)
    if method is not None:
        taken = inspect.signature(method).parameters
        method(**{name: value for name, value in arguments.items() if name in taken})


def lifecycle(tracker: Any, run: Any, steps: Mapping[int, Mapping[str, Any]]) -> None:
    """Call the hooks of a whole run."""
    fire(tracker, "twinkle_run_start", run=run)
    for step, metrics in steps.items():
        fire(tracker, "twinkle_step_end", run=run, step=step, metrics=metrics)
    fire(tracker, "twinkle_checkpoint_saved", run=run, path=run.folder / "checkpoint", step=max(steps))
    fire(tracker, "twinkle_run_end", run=run)


def hooks(case: TrackerCase) -> None:
    """Its methods fit the hook specs, so that it can be attached to a run."""
    from twinkle._registry import registry

    tracker, name = case.build(), f"contract:{id(case)}"
    registry().attach(tracker, name)
    registry().detach(name)
    marked = [hook for hook in _HOOKS if hasattr(getattr(tracker, hook, None), "twinkle_impl")]
    require(marked, f"none of its methods is marked with twinkle_registry.hookimpl; there are {', '.join(_HOOKS)}")


def whole_run(case: TrackerCase) -> None:
    """It records a run from the first step to the last, and the numbers are those that were logged."""
    run, steps = case.run(), {step: {**NUMBERS, "loss": 2.5 / step} for step in (1, 2, 3)}
    lifecycle(case.build(), run, steps)
    if case.read is not None:
        found = {step: {name: values.get(name) for name in steps[1]} for step, values in case.recorded(run).items()}
        require(same(found, steps, tolerance=1e-6), f"it recorded {found}; logged was {steps}")


def not_finite(case: TrackerCase) -> None:
    """NaN and infinite numbers cause no error, and later steps are recorded."""
    run = case.run()
    odd = {"loss": float("nan"), "grad_norm": float("inf"), "low": float("-inf"), "accuracy": 0.5}
    lifecycle(case.build(), run, {1: odd, 2: NUMBERS})
    if case.read is not None:
        found = case.recorded(run)
        require(same(found.get(1, {}).get("accuracy"), 0.5, tolerance=1e-6), f"beside NaN it lost a number: {found}")
        require(2 in found, f"after NaN it recorded nothing more: {found}")


def continued(case: TrackerCase) -> None:
    """A run that continues in its folder keeps earlier steps, and no step is recorded twice."""
    run = case.run()
    lifecycle(case.build(), run, {step: {"loss": float(step)} for step in (1, 2, 3, 4)})
    lifecycle(case.build(), run, {step: {"loss": 10.0 + step} for step in (3, 4, 5)})
    found = {step: values.get("loss") for step, values in case.recorded(run).items()}
    expected = {1: 1.0, 2: 2.0, 3: 13.0, 4: 14.0, 5: 15.0}
    require(same(found, expected, tolerance=1e-6), f"steps 1 to 4, then 3 to 5 again gave {found}, not {expected}")


def failed_run(case: TrackerCase) -> None:
    """A run that ends with an error, with Ctrl-C or before its first step causes no error, also if it ends twice."""
    for error in (ValueError("no"), KeyboardInterrupt()):
        run, tracker = case.run(), case.build()
        fire(tracker, "twinkle_run_start", run=run)
        fire(tracker, "twinkle_run_error", run=run, error=error)
        fire(tracker, "twinkle_run_end", run=run)
        fire(tracker, "twinkle_run_end", run=run)


def never_started(case: TrackerCase) -> None:
    """An end without a start causes no error, because another tracker may have failed first."""
    fire(case.build(), "twinkle_run_end", run=case.run())


def steps_stand_at_once(case: TrackerCase) -> None:
    """A step is on disk before the next one ends, so that a killed run keeps it."""
    run, tracker = case.run(), case.build()
    fire(tracker, "twinkle_run_start", run=run)
    try:
        for step in (1, 2):
            fire(tracker, "twinkle_step_end", run=run, step=step, metrics=NUMBERS)
        require(1 in case.recorded(run), "after two steps the first cannot be read; flush each step")
    finally:
        fire(tracker, "twinkle_run_end", run=run)


def metrics_left_alone(case: TrackerCase) -> None:
    """It does not change the numbers."""
    run, tracker = case.run(), case.build()
    fire(tracker, "twinkle_run_start", run=run)
    try:
        left_alone(
            lambda given: fire(tracker, "twinkle_step_end", run=run, step=1, metrics=given), dict(NUMBERS), "numbers"
        )
    finally:
        fire(tracker, "twinkle_run_end", run=run)


def released(case: TrackerCase) -> None:
    """At the end of a run it closes every file that it opened."""
    import shutil

    run, tracker = case.run(), case.build()
    lifecycle(tracker, run, {1: NUMBERS})
    open_files = _open_below(run.folder)
    if open_files:
        raise Violation(f"after the end of the run these files are still open: {', '.join(open_files)}")
    shutil.rmtree(run.folder)


CASE = TrackerCase
CHECKS = (
    hooks,
    whole_run,
    not_finite,
    continued,
    failed_run,
    never_started,
    steps_stand_at_once,
    metrics_left_alone,
    released,
)


def _open_below(folder: Path) -> list[str]:
    """Return the open files of this process below a folder; empty if the system does not list them."""
    handles = Path("/proc/self/fd")
    if not handles.is_dir():
        return []
    targets = []
    for handle in handles.iterdir():
        try:
            targets.append(handle.readlink())
        except OSError:  # the descriptor of this listing itself
            continue
    return sorted(str(path) for path in targets if path.is_relative_to(folder.resolve()))
