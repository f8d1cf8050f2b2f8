"""What the loss needs and the repository brings along."""

from typing import Any


def weight(logps: Any, gamma: float) -> Any:
    """Return `(1 - p)^gamma`."""
    return (1 - logps.exp()) ** gamma
