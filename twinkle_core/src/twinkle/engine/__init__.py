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

__getattr__, __dir__ = lazy_names(__name__, "engine")
