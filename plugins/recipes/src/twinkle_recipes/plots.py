"""The loss curve: what a run remembers of its steps, and the picture of it."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle.logging import get_logger

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass
class History:
    """The numbers of all steps so far, as (step, number) pairs."""

    steps: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path, last_step: int) -> "History":
        """Return what a `metrics.jsonl` holds up to `last_step`; a missing file is an empty history."""
        history = cls()
        if path.is_file():
            for text in path.read_text(encoding="utf-8").splitlines():
                try:
                    line = json.loads(text)
                except json.JSONDecodeError:
                    continue  # cut off by a crash
                if line.get("step", 0) and line["step"] <= last_step:
                    history.add(line["step"], line)
        return history

    @property
    def last(self) -> Mapping[str, Any]:
        """The numbers of the newest step; none where there was no step."""
        return self.steps[-1][1] if self.steps else {}

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Remember one step."""
        self.steps.append((step, metrics))

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Return the steps that have a finite number `name`, and these numbers."""
        pairs = [(step, metrics[name]) for step, metrics in self.steps if _is_finite(metrics.get(name))]
        return [step for step, _ in pairs], [float(value) for _, value in pairs]


def smoothed(values: Sequence[float], weight: float = 0.8) -> list[float]:
    """Return the exponential moving average of `values`, corrected for its start (arXiv:1412.6980, section 3).

    Args:
        values: one number a step.
        weight: how much of the past is kept at each step; 0 gives `values` back.
    """
    averages: list[float] = []
    average = 0.0
    for count, value in enumerate(values, start=1):
        average = weight * average + (1 - weight) * value
        averages.append(average / (1 - weight**count))
    return averages


def loss_figure(history: History, title: str) -> "Figure":
    """Return a figure of the training loss (each step and smoothed) and of the evaluations."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    steps, losses = history.series("loss")
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=1, label="training, each step")
    axes.plot(steps, smoothed(losses), color="tab:blue", linewidth=2, label="training, smoothed")
    eval_steps, eval_losses = history.series("eval/loss")
    if eval_steps:
        axes.plot(eval_steps, eval_losses, color="tab:orange", marker="o", linewidth=1.5, label="evaluation")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(title)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.legend()
    return figure


def write_loss_curve(history: History, path: Path, title: str) -> Path | None:
    """Write the loss curve as PNG; None where there is nothing to draw, no matplotlib, or no room (the log says so)."""
    if not history.series("loss")[0]:
        return None
    try:
        figure = loss_figure(history, title)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        get_logger(__name__).warning("no loss curve: matplotlib is not installed; run: pip install matplotlib")
        return None
    work = path.with_name(f".{path.name}.tmp")
    try:
        figure.savefig(work, format="png")
        work.replace(path)
    except OSError as error:  # a picture must not hide why the run ends, which may be the same full disk
        work.unlink(missing_ok=True)
        get_logger(__name__).warning("no loss curve: %s cannot be written: %s", path, error.strerror or error)
        return None
    return path


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
