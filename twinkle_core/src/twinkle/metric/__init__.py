"""Metrics: the contract `Metric`, and every installed metric by name."""

from twinkle._registry import room
from twinkle.metric.base import Metric

__all__ = ["Metric"]

__getattr__, __dir__ = room(__name__, "metric")
