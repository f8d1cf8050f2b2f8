"""Advantages: the contract `Advantage`, and every installed estimator by name."""

from twinkle._registry import lazy_names
from twinkle.advantage.base import Advantage

__all__ = ["Advantage"]

__getattr__, __dir__ = lazy_names(__name__, "advantage")
