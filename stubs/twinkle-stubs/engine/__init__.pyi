# Written by `twinkle plugins types`; do not edit.
"""Engines: the contract `Engine` of a base model that trains and samples many adapters, and every installed engine."""

from twinkle._registry import lazy_names
from twinkle.engine.base import (
    AdapterBytes,
    AdapterRef,
    AdapterSpec,
    AdapterVersion,
    Engine,
    EngineInfo,
    Feature,
    Operation,
    OperationError,
    OperationResult,
    Progress,
    SampledTokens,
    SampleRequest,
    SavedAdapter,
    Step,
    StepResult,
    Usage,
    check_features,
)

__all__ = [
    "AdapterBytes",
    "AdapterRef",
    "AdapterSpec",
    "AdapterVersion",
    "Engine",
    "EngineInfo",
    "Feature",
    "Operation",
    "OperationError",
    "OperationResult",
    "Progress",
    "SampleRequest",
    "SampledTokens",
    "SavedAdapter",
    "Step",
    "StepResult",
    "Usage",
    "check_features",
]


from twinkle_transformers.engine import TransformersEngine as TransformersEngine
