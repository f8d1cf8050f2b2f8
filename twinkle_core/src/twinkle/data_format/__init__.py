"""The data formats of the contracts: rows, tokens, samples and outputs, as plain dicts and dataclasses."""

from twinkle.data_format.features import IGNORE_INDEX, InputBatch, InputFeature, InputType
from twinkle.data_format.messages import (
    ROLES,
    Message,
    Tool,
    ToolCall,
    Trajectory,
    pack_value,
    split_reasoning,
    user_data_get,
)
from twinkle.data_format.outputs import LossOutput, ModelOutput
from twinkle.data_format.sampling import SampledSequence, SampleResponse, SamplingParams, StopReason

__all__ = [
    "IGNORE_INDEX",
    "ROLES",
    "InputBatch",
    "InputFeature",
    "InputType",
    "LossOutput",
    "Message",
    "ModelOutput",
    "SampleResponse",
    "SampledSequence",
    "SamplingParams",
    "StopReason",
    "Tool",
    "ToolCall",
    "Trajectory",
    "pack_value",
    "split_reasoning",
    "user_data_get",
]
