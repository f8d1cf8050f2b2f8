"""What a run may log: metrics by name, and steps that never go back."""

import operator
from collections.abc import Mapping
from typing import Any

from twinkle.errors import ArgumentError


def checked_metrics(metrics: Any) -> Mapping[str, Any]:
    """Return the metrics, if they are names with a number or a text each.

    Raises:
        ArgumentError: they are not; the text names the metric.
    """
    if not isinstance(metrics, Mapping):
        raise ArgumentError(
            f"run.log: metrics is of type {type(metrics).__name__}; give a mapping, such as {{'loss': 2.5}}"
        )
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise ArgumentError(f"run.log: a metric is called {name!r}; its name is a text, such as 'loss'")
        if not _is_number_or_text(value):
            raise ArgumentError(
                f"run.log: metric {name!r} is of type {type(value).__name__} and not one number; "
                "give a number or a text"
            )
    return metrics


def checked_step(step: Any, last: int) -> int:
    """Return the number of a step as an int, if it is one that may follow step `last`.

    Raises:
        ArgumentError: it may not.
    """
    try:
        number = operator.index(step)
    except (TypeError, ValueError, RuntimeError):  # a tensor of several numbers raises either of the latter
        number = -1
    if number < 0 or isinstance(step, bool):
        what = repr(step) if isinstance(step, int | float | str) else f"of type {type(step).__name__}"
        raise ArgumentError(f"run.log: step is {what}; give a whole number from 0, such as step=1")
    if number < last:
        raise ArgumentError(f"run.log: step {number} comes after step {last}; log the steps in their order")
    return number


def _is_number_or_text(value: Any) -> bool:
    if isinstance(value, str | int | float):
        return True
    if isinstance(value, bytes | bytearray):  # `float` would read them as a text
        return False
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError):  # a tensor of several numbers raises one of the latter
        return False
    return True
