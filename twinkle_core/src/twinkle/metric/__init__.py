"""Metrics: the contract `Metric`, and every installed metric by name."""

from twinkle._registry import lazy_names
from twinkle.metric.base import Metric

__all__ = ["Metric"]

__getattr__, __dir__ = lazy_names(__name__, "metric")
