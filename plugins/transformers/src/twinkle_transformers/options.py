"""Validation of the arguments of the models of this package."""

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
        precision: `mixed_precision` of the model.
        strategy: published name of a strategy for several devices.
        policy: `on_nonfinite` of the model.
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
    """Refuse a model without an id, and suggest the argument that probably contains it."""
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
    """Refuse unknown tasks, and temperatures of 0 or less."""
    if not temperature > 0:
        raise ArgumentError(f"temperature must be above 0 in a forward, got {temperature}")
    if task not in ("causal_lm", "fused_lm_ce", "embedding"):
        raise Unsupported(f"task={task!r}; choose 'causal_lm', 'fused_lm_ce' or 'embedding'")


def top_of_call(topk: Any) -> int:
    """Return `topk_logprobs` of a call, 0 for None."""
    if topk is None:
        return 0
    if isinstance(topk, bool) or not isinstance(topk, int) or topk < 1:
        raise ArgumentError(f"topk_logprobs must be an integer of at least 1, or None, got {topk!r}")
    return topk


def check_clipping(max_norm: Any, norm_type: Any) -> None:
    """Refuse an invalid maximum norm or norm type."""
    if isinstance(max_norm, bool) or not isinstance(max_norm, Real) or math.isnan(max_norm):
        raise ArgumentError(f"max_grad_norm must be a number (0 to measure without clipping), got {max_norm!r}")
    if isinstance(norm_type, bool) or not isinstance(norm_type, Real) or not float(norm_type) > 0:
        raise ArgumentError(
            f"norm_type must be a number above 0 (float('inf') for the largest entry), got {norm_type!r}"
        )


def check_name(name: str, interval: int) -> None:
    """Refuse checkpoint names outside their folder, and intervals below 1."""
    parts = PurePath(name).parts
    if not parts or ".." in parts or PurePath(name).is_absolute():
        raise ArgumentError(f"save: name must be a path below output_dir, got {name!r}; give the parent as output_dir")
    if interval < 1:
        raise ArgumentError(f"save: interval must be at least 1, got {interval}")


def plain_state(state: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the state of a loop as a checkpoint will restore it; `{}` for None."""
    try:
        kept: dict[str, Any] = json.loads(json.dumps(dict(state or {}), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"save: loop_state must contain only JSON values ({error})") from error
    return kept


def check_adapter(name: str, taken: Mapping[str, Any]) -> None:
    """Refuse adapter names that exist, or that could be parts of a module's path."""
    if not isinstance(name, str) or not name.replace("-", "_").isidentifier():
        raise ArgumentError(
            f"adapter name must consist of letters, digits, '_' and '-', and not start with a digit, got {name!r}"
        )
    if name in taken:
        raise ArgumentError(f"adapter {name!r} already exists; choose another name")
