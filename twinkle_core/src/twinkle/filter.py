"""Filters: the contract `Filter` (published also as `DataFilter`), and every installed filter by name."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from twinkle._lazy import room

__all__ = ["DataFilter", "Filter"]


class Filter(ABC):
    """Decides row by row what stays in a data set."""

    @abstractmethod
    def __call__(self, row: Mapping[str, Any]) -> bool:
        """Return True to keep `row`."""


DataFilter = Filter

__getattr__, __dir__ = room(__name__, "filter")
