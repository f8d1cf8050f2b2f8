"""Models: the contracts `TwinkleModel` and `AdapterPool`, and every installed model by name."""

from typing import TYPE_CHECKING

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

# Names of our own plugins, for editors and type checkers; scripts/type_names.py writes them.
if TYPE_CHECKING:
    from twinkle_transformers.model import TransformersModel as TransformersModel
    from twinkle_transformers.pool.multi import MultiLoraTransformersModel as MultiLoraTransformersModel
