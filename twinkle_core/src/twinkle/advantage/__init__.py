"""Advantages: the contract `Advantage`, and every installed estimator by name."""

from twinkle._registry import room
from twinkle.advantage.base import Advantage

__all__ = ["Advantage"]

__getattr__, __dir__ = room(__name__, "advantage")
