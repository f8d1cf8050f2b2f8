"""Preprocessors: the base class `Preprocessor`, `DataFilter`, and every installed preprocessor by name."""

from typing import TYPE_CHECKING

from twinkle._lazy import room
from twinkle.filter import DataFilter, Filter
from twinkle.preprocessor.base import Preprocessor

__all__ = ["DataFilter", "Filter", "Preprocessor"]

__getattr__, __dir__ = room(__name__, "preprocessor")

# Names of our own plugins, for editors and type checkers; scripts/type_names.py writes them.
if TYPE_CHECKING:
    from twinkle_data.self_cognition import SelfCognitionProcessor as SelfCognitionProcessor
