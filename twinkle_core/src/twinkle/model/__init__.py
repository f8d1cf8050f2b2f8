"""Models: the contract `TwinkleModel`, and every installed model by name.

Operations on several adapters (`Operation`, `Step`, ...) are those of `twinkle.engine`.
"""

from twinkle._registry import lazy_names
from twinkle.engine import (
    AdapterBytes,
    AdapterRef,
    Operation,
    OperationError,
    OperationResult,
    Step,
    StepResult,
    Usage,
)
from twinkle.model.base import TwinkleModel

__all__ = [
    "AdapterBytes",
    "AdapterRef",
    "Operation",
    "OperationError",
    "OperationResult",
    "Step",
    "StepResult",
    "TwinkleModel",
    "Usage",
]

__getattr__, __dir__ = lazy_names(__name__, "model")
