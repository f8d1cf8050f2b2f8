# Written by `twinkle plugins types`; do not edit.
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


from twinkle_transformers.model import TransformersModel as TransformersModel
from twinkle_transformers.pool.multi import MultiLoraTransformersModel as MultiLoraTransformersModel
