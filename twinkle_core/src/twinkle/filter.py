"""Filters: the contract `Filter` (published also as `DataFilter`), and every installed filter by name."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from twinkle._registry import lazy_names

__all__ = ["DataFilter", "Filter"]


class Filter(ABC):
    """Decides row by row what stays in a data set."""

    @abstractmethod
    def __call__(self, row: Mapping[str, Any]) -> bool:
        """Return True to keep `row`."""

    def reset(self) -> None:
        """Forget the rows seen so far, for filters that remember any; data sets call it when a pass begins."""
        return


DataFilter = Filter

__getattr__, __dir__ = lazy_names(__name__, "filter")
