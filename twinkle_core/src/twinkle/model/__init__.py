"""Models: the contract `TwinkleModel`, and every installed model by name.

Operations on several adapters (`Operation`, `Step`, ...) are those of `twinkle.engine`.
"""

from twinkle._registry import room
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

__getattr__, __dir__ = room(__name__, "model")
