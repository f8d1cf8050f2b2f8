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
    """Begin the head that a model's files do not have, and return the loader's report without it.

    The weights are drawn with a seed of their own, so that every rank and every run begins with the same head.

    Args:
        model: as loaded.
        report: what `from_pretrained` said of its weights: missing, left over, of another shape.
        folder: where the files are, for the log.
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
    """Return PEFT's name for what an adapter on `model` is for; for heads that score, the head is trained with it.

    Raises:
        ArgumentError: the configuration asks for a language model's task, and the model has no such head.
    """
    language = model.get_output_embeddings() is not None
    if asked == "CAUSAL_LM" and not language:
        raise ArgumentError(
            f"the adapter's task_type is {asked!r}, but {type(model).__name__} predicts no tokens; leave task_type out"
        )
    if asked:
        return asked
    if language:
        return "CAUSAL_LM"
    return next((task for end, task in _TASKS.items() if type(model).__name__.endswith(end)), "FEATURE_EXTRACTION")


def leave_head(config: Any) -> None:
    """Keep low-rank terms off a head that is trained whole: PEFT takes the one of tokens for a layer like others."""
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
