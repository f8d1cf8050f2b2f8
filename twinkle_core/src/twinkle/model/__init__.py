"""Models: the contracts `TwinkleModel` and `AdapterPool`, and every installed model by name."""

from twinkle._lazy import room
from twinkle.model.base import TwinkleModel
from twinkle.model.pool import (
    AdapterBytes,
    AdapterPool,
    AdapterRef,
    Operation,
    OperationError,
    OperationResult,
    Step,
    StepResult,
    Usage,
)

__all__ = [
    "AdapterBytes",
    "AdapterPool",
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
