"""The contract of a notifier."""

from abc import ABC, abstractmethod
from typing import Any


class Notifier(ABC):
    """Tells people about a run. It must never break the run, and never print a secret."""

    @abstractmethod
    def __call__(self, message: str) -> None:
        """Deliver `message`."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return what `from_dict` needs to build this notifier in another process."""
