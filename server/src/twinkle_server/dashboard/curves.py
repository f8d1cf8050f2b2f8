"""Curves of a run: what is computed from the figures of its steps."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from twinkle_server.store.figures import Step

_MEANS: Final = ("reward", "advantage", "kl", "mismatch")
"""Figures that are kept as sum and count."""
NAMES: Final = {
    "loss": "loss per token",
    "reward": "reward",
    "mismatch": "mean mismatch",
    "mismatch_max": "largest mismatch",
    "kl": "KL estimate",
    "advantage": "advantage",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "tokens": "trained tokens per step",
    "seconds": "seconds per step",
}
"""Titles of the curves, in the order of the page; further metrics of a loss follow under their own names."""


def points(steps: Sequence[Step], before: float | None = None) -> list[dict[str, Any]]:
    """Return a point of each curve for each step; a curve has no value where a figure is missing.

    Args:
        steps: in order.
        before: time of the step before the first one.
    """
    found = []
    for step in steps:
        seconds = None if before is None else max(0.0, step.time - before) / step.count
        found.append({"step": step.step, "time": step.time, **_values(step), "seconds": seconds})
        before = step.time
    return [{name: value for name, value in point.items() if value is not None} for point in found]


def _values(step: Step) -> dict[str, float | None]:
    data, tokens = step.data, step.data.get("tokens") or 0
    values: dict[str, float | None] = {
        "loss": data["loss"] / tokens if tokens and data.get("loss") is not None else None,
        "tokens": tokens / step.count if tokens else None,
        "lr": data.get("lr"),
        "grad_norm": data.get("grad_norm"),
    }
    for name in _MEANS:
        total = data.get(name)
        values[name] = total[0] / total[1] if total and total[1] else None
    mismatch = data.get("mismatch")
    values["mismatch_max"] = mismatch[2] if mismatch else None
    rows = data.get("rows") or 0
    metrics: Mapping[str, float] = data.get("metrics", {})
    return values | {f"metric {name}": value / rows for name, value in metrics.items() if rows}
