"""What the constructor and the calls of `TransformersModel` accept on one device, and how the rest is refused."""

import json
import math
from collections.abc import Mapping
from numbers import Real
from pathlib import PurePath
from typing import Any

import torch

from twinkle.errors import ArgumentError, Unsupported

PRECISION = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Autocast dtype of each mixed precision."""

_STRATEGIES = ("accelerate", "native_fsdp")


def check_model_options(precision: str, strategy: str, policy: str, scaler: Mapping[str, Any] | None) -> None:
    """Refuse options that do not exist or that would be ignored.

    Args:
        precision: mixed precision.
        strategy: the published name of a way to train on several devices.
        policy: what happens to numbers that are not finite.
        scaler: options of the loss scale of fp16.
    """
    if precision not in PRECISION:
        raise Unsupported(f"TransformersModel: mixed_precision={precision!r}; choose from {sorted(PRECISION)}")
    if strategy not in _STRATEGIES:
        raise ArgumentError(f"TransformersModel: strategy={strategy!r}; choose 'accelerate' or 'native_fsdp'")
    if policy not in ("raise", "skip"):
        raise ArgumentError(f"TransformersModel: on_nonfinite={policy!r}; choose 'raise' or 'skip'")
    if scaler and precision != "fp16":
        raise ArgumentError(f"TransformersModel: grad_scaler_config is for mixed_precision='fp16', not {precision!r}")


def check_model_id(model_id: Any, model_cls: Any, others: Mapping[str, Any]) -> None:
    """Refuse a model without an id, and say where the id that was meant may stand instead."""
    if model_id is not None:
        return
    meant = (
        model_cls if isinstance(model_cls, str | PurePath) else others.get("model", others.get("model_name_or_path"))
    )
    instead = f": model_id={str(meant)!r}" if isinstance(meant, str | PurePath) else ""
    raise ArgumentError(
        f"TransformersModel: model_id is missing; give a folder, a GGUF file or a reference by that name{instead}"
    )


def check_call(task: str, temperature: float) -> None:
    """Refuse tasks that there are not, and temperatures that are none."""
    if not temperature > 0:
        raise ArgumentError(f"temperature={temperature}; a forward needs a number above 0")
    if task not in ("causal_lm", "fused_lm_ce", "embedding"):
        raise Unsupported(f"task={task!r}; choose 'causal_lm', 'fused_lm_ce' or 'embedding'")


def top_of_call(topk: Any) -> int:
    """Return how many most probable tokens a call asks for: `topk_logprobs`, 0 for None."""
    if topk is None:
        return 0
    if isinstance(topk, bool) or not isinstance(topk, int) or topk < 1:
        raise ArgumentError(f"topk_logprobs={topk!r}; it must be a whole number of at least 1, or None")
    return topk


def check_clipping(max_norm: Any, norm_type: Any) -> None:
    """Refuse a bound or a norm that is none."""
    if isinstance(max_norm, bool) or not isinstance(max_norm, Real) or math.isnan(max_norm):
        raise ArgumentError(f"max_grad_norm={max_norm!r}; give a number, 0 to measure without clipping")
    if isinstance(norm_type, bool) or not isinstance(norm_type, Real) or not float(norm_type) > 0:
        raise ArgumentError(f"norm_type={norm_type!r}; give a number above 0, float('inf') for the largest entry")


def check_name(name: str, interval: int) -> None:
    """Refuse checkpoint names that leave their folder, and intervals below 1."""
    parts = PurePath(name).parts
    if not parts or ".." in parts or PurePath(name).is_absolute():
        raise ArgumentError(f"save: name {name!r} must lie below output_dir; give the parent as output_dir")
    if interval < 1:
        raise ArgumentError(f"save: interval={interval}; it must be at least 1")


def plain_state(state: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what a loop wants kept in a checkpoint, as it will come back; nothing for None."""
    try:
        kept: dict[str, Any] = json.loads(json.dumps(dict(state or {}), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"save: loop_state cannot be written as JSON ({error}); give plain values") from error
    return kept


def check_adapter(name: str, taken: Mapping[str, Any]) -> None:
    """Refuse adapter names that exist or that could be mistaken for a module's."""
    if not isinstance(name, str) or not name.replace("-", "_").isidentifier():
        raise ArgumentError(f"adapter name {name!r}: use letters, digits, '_' and '-', not beginning with a digit")
    if name in taken:
        raise ArgumentError(f"adapter {name!r} exists already; choose another name")
