"""Metrics of a run's steps: names in logs, durations of phases, and charts."""

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle.logging import get_logger

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_RENAMED = {"learning rate": "learning_rate"}
_LEFT_OUT = ("iters", "total time elapse", "speed")  # duplicates of the step number and of our own timer


def readable(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's metrics under names without spaces, without those that the recipe measures itself."""
    return {_RENAMED.get(name, name): value for name, value in metrics.items() if name not in _LEFT_OUT}


def losses_of(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the training and evaluation loss of a step, if present, as `last_loss` and `eval/loss`."""
    names = {"loss": "last_loss", "eval/loss": "eval/loss"}
    return {shown: metrics[name] for name, shown in names.items() if name in metrics}


def is_due(step: int, every: int) -> bool:
    """Return whether an action that is due every `every` steps is due at `step`; 0 means never."""
    return every > 0 and step % every == 0


def plain(value: Any) -> Any:
    """Return arrays and tensors as lists and anything else as text, for `json.dumps(default=...)`."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


class Stopwatch:
    """Measures named phases, one after the other, in seconds."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the time that the block takes to a phase."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.monotonic() - started

    @property
    def total(self) -> float:
        """Seconds of all phases."""
        return sum(self._seconds.values())

    def metrics(self) -> dict[str, float]:
        """Return the seconds of each phase, by `seconds/<phase>`."""
        return {f"seconds/{phase}": seconds for phase, seconds in self._seconds.items()}


@dataclass
class History:
    """The numbers of all steps so far, as (step, number) pairs."""

    steps: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path, last_step: int) -> "History":
        """Return the content of a `metrics.jsonl` up to `last_step`; a missing file is an empty history."""
        history = cls()
        if path.is_file():
            for text in path.read_text(encoding="utf-8").splitlines():
                try:
                    line = json.loads(text)
                except json.JSONDecodeError:
                    continue  # truncated by a crash
                if line.get("step", math.inf) <= last_step:
                    history.add(line["step"], line)
        return history

    @property
    def last(self) -> Mapping[str, Any]:
        """The numbers of the newest step; empty without steps."""
        return self.steps[-1][1] if self.steps else {}

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record one step."""
        self.steps.append((step, metrics))

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Return the steps that have a finite number `name`, and these numbers."""
        pairs = [(step, metrics[name]) for step, metrics in self.steps if _is_finite(metrics.get(name))]
        return [step for step, _ in pairs], [float(value) for _, value in pairs]


def smoothed(values: Sequence[float], weight: float = 0.8) -> list[float]:
    """Return the exponential moving average of `values`, corrected for its start (arXiv:1412.6980, section 3).

    Args:
        values: one number per step.
        weight: weight of the past values; 0 returns `values`.
    """
    averages: list[float] = []
    average = 0.0
    for count, value in enumerate(values, start=1):
        average = weight * average + (1 - weight) * value
        averages.append(average / (1 - weight**count))
    return averages


@dataclass(frozen=True)
class Curve:
    """A chart of numbers of a run over its steps.

    Attributes:
        lines: name of a number, and its label; several are drawn in one chart.
        unit: label of the vertical axis.
        points: numbers of some steps, such as evaluations; drawn with markers.
        from_zero: whether the vertical axis begins at 0; no number may be below.
    """

    lines: Mapping[str, str]
    unit: str
    points: Mapping[str, str] = field(default_factory=dict)
    from_zero: bool = False


LOSS = Curve({"loss": "training"}, "loss (nats per token)", {"eval/loss": "evaluation"}, from_zero=True)


def figure_of(history: History, curve: Curve, title: str) -> "Figure":
    """Return a figure of a curve: each step and smoothed, and the points."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    colours = (f"tab:{name}" for name in ("blue", "orange", "green", "red", "purple", "brown", "pink", "gray"))
    for (name, label), colour in zip(curve.lines.items(), colours, strict=False):
        steps, values = history.series(name)
        if steps:
            axes.plot(steps, values, color=colour, alpha=0.3, linewidth=1, label=f"{label}, each step")
            axes.plot(steps, smoothed(values), color=colour, linewidth=2, label=f"{label}, smoothed")
    for (name, label), colour in zip(curve.points.items(), colours, strict=False):
        steps, values = history.series(name)
        if steps:
            axes.plot(steps, values, color=colour, marker="o", linewidth=1.5, label=label)
    axes.set_xlabel("optimizer step")
    axes.locator_params(axis="x", integer=True)
    axes.set_ylabel(curve.unit)
    axes.set_title(title)
    if curve.from_zero:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.legend()
    return figure


def write_curve(history: History, curve: Curve, path: Path, title: str) -> Path | None:
    """Write a curve as PNG; None, with a message in the log, without data, matplotlib or disk space."""
    if not any(history.series(name)[0] for name in (*curve.lines, *curve.points)):
        return None
    try:
        figure = figure_of(history, curve, title)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        get_logger(__name__).warning("no %s curve: matplotlib is not installed; pip install matplotlib", path.stem)
        return None
    work = path.with_name(f".{path.name}.tmp")
    try:
        figure.savefig(work, format="png")
        work.replace(path)
    except OSError as error:  # a failed chart must not hide why the run ends, such as a full disk
        work.unlink(missing_ok=True)
        get_logger(__name__).warning("no %s curve: %s cannot be written: %s", path.stem, path, error.strerror or error)
        return None
    return path


def loss_figure(history: History, title: str) -> "Figure":
    """Return a figure of the training loss (each step and smoothed) and of the evaluations."""
    return figure_of(history, LOSS, title)


def write_loss_curve(history: History, path: Path, title: str) -> Path | None:
    """Write the loss curve; see `write_curve`."""
    return write_curve(history, LOSS, path, title)


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
