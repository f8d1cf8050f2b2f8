"""Preprocessors: the base class `Preprocessor`, `DataFilter`, and every installed preprocessor by name."""

from twinkle._registry import lazy_names
from twinkle.filter import DataFilter, Filter
from twinkle.preprocessor.base import Preprocessor

__all__ = ["DataFilter", "Filter", "Preprocessor"]

__getattr__, __dir__ = lazy_names(__name__, "preprocessor")
