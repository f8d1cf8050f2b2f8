"""The numbers of a step, as the recipe logs them."""

from collections.abc import Mapping
from typing import Any

_RENAMED = {"learning rate": "learning_rate"}
_LEFT_OUT = ("iters", "total time elapse", "speed")  # the step number and our own clock say the same


def readable(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's metrics under names without spaces, without those that the recipe measures itself."""
    return {_RENAMED.get(name, name): value for name, value in metrics.items() if name not in _LEFT_OUT}


def losses_of(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the training and evaluation loss of a step, as far as they are there, as `last_loss` and `eval/loss`."""
    names = {"loss": "last_loss", "eval/loss": "eval/loss"}
    return {shown: metrics[name] for name, shown in names.items() if name in metrics}


def is_due(step: int, every: int) -> bool:
    """Say whether something that happens each `every` steps happens at `step`; 0 is never."""
    return every > 0 and step % every == 0


def plain(value: Any) -> Any:
    """Return arrays and tensors as lists and anything else as text, for `json.dumps(default=...)`."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
