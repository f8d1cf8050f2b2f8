"""Heads that a language model's files lack (`AutoModelForSequenceClassification`, ...), and models without a head."""

from pathlib import Path
from typing import Any

import torch

from twinkle.errors import ArgumentError
from twinkle.logging import get_logger

_TASKS = {"ForSequenceClassification": "SEQ_CLS", "ForTokenClassification": "TOKEN_CLS"}
_NEW = ("score.weight", "score.bias")
_LEFT_OVER = ("lm_head.weight", "lm_head.bias")


def settle_head(model: Any, report: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Initialize a head that is missing in a model's files, and return the loader's report without it.

    The weights are drawn with a fixed seed, so that every rank and every run starts with the same head.

    Args:
        model: the loaded model.
        report: report of `from_pretrained`: missing, unexpected and mismatched weights.
        folder: folder of the model, for the log.
    """
    scores = type(model).__name__.endswith(tuple(_TASKS))
    new = {name for name in report["missing_keys"] if scores and name in _NEW}
    if not new and model.base_model is not model:
        return report
    if new:
        get_logger().info(
            "%s has no head for %s; the new one (%s) is random and must be trained",
            folder,
            type(model).__name__,
            ", ".join(sorted(new)),
        )
    _draw(model, new)
    return {
        **report,
        "missing_keys": {name for name in report["missing_keys"] if name not in new},
        "unexpected_keys": {name for name in report["unexpected_keys"] if name not in _LEFT_OVER},
    }


def peft_task(model: Any, asked: str | None) -> str:
    """Return PEFT's task type of an adapter on `model`; with classification heads, the head is trained too.

    Raises:
        ArgumentError: the configuration asks for a language model's task, and the model has no such head.
    """
    language = model.get_output_embeddings() is not None
    if asked == "CAUSAL_LM" and not language:
        raise ArgumentError(
            f"the adapter's task_type is {asked!r}, but {type(model).__name__} does not predict tokens; leave it out"
        )
    if asked:
        return asked
    if language:
        return "CAUSAL_LM"
    return next((task for end, task in _TASKS.items() if type(model).__name__.endswith(end)), "FEATURE_EXTRACTION")


def leave_head(config: Any) -> None:
    """Exclude a fully trained head from the targets: PEFT would treat it like other linear layers."""
    if config.task_type == _TASKS["ForTokenClassification"] and config.target_modules == "all-linear":
        config.exclude_modules = config.exclude_modules or ["score"]


@torch.no_grad()
def _draw(model: Any, names: set[str]) -> None:
    generator = torch.Generator().manual_seed(0)
    spread = getattr(model.config.get_text_config(), "initializer_range", 0.02)
    for name in sorted(names):
        parameter = model.get_parameter(name)
        factor = spread if name.endswith("weight") else 0.0
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * factor)
