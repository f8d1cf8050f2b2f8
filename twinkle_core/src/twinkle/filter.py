"""Filters: the contract `Filter` (published also as `DataFilter`), and every installed filter by name."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from twinkle._registry import lazy_names

__all__ = ["DataFilter", "Filter"]


class Filter(ABC):
    """Decides for each row whether it stays in a data set."""

    @abstractmethod
    def __call__(self, row: Mapping[str, Any]) -> bool:
        """Return True to keep `row`."""

    def reset(self) -> None:
        """Clear the state of filters that remember rows; data sets call it when a pass begins."""
        return


DataFilter = Filter

__getattr__, __dir__ = lazy_names(__name__, "filter")
