"""A readable summary of what is trained and how."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from twinkle_transformers.group import OptimizerGroup
from twinkle_transformers.losses import loss_name


def describe(
    model: nn.Module, group: OptimizerGroup, *, precision: str, source: str, trained: int | None = None
) -> str:
    """Return a few lines: model, adapter, parameters, loss, optimizer, scheduler, accumulation.

    Args:
        model: the module.
        group: whose.
        precision: of the model.
        source: where the model is from.
        trained: number of trained parameters; by default those of the module that take a gradient.
    """
    total = sum(p.numel() for p in model.parameters())
    if trained is None:
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    first = next(model.parameters())
    lines = {
        "model": f"{source} ({total:,} parameters, {first.dtype}, on {first.device})".replace("torch.", ""),
        "mixed precision": precision,
        "adapter": _adapter(group),
        "trained": f"{trained:,} parameters ({100 * trained / total:.2f} %)",
        "loss": loss_name(group.loss_instance) if group.loss_instance is not None else "CrossEntropyLoss",
        "optimizer": _optimizer(group),
        "scheduler": _scheduler(group),
        "accumulation": f"{group.gradient_accumulation_steps} backward calls a step",
    }
    return "\n".join(f"{name:<16} {text}" for name, text in lines.items())


def _adapter(group: OptimizerGroup) -> str:
    config: Any = group.adapter_config
    if config is None:
        return "none: the whole model is trained"
    targets = config.target_modules
    shown = targets if isinstance(targets, str) else ", ".join(sorted(targets))
    return f"{group.adapter_name}: LoRA r={config.r}, alpha={config.lora_alpha}, dropout={config.lora_dropout}, {shown}"


def _optimizer(group: OptimizerGroup) -> str:
    if group.optimizer is None:
        return "not set (AdamW at the first step)"
    # A scheduler has set the rate of the next step already, which is 0 at the start of a warm-up.
    rates = [part.get("initial_lr", part["lr"]) for part in group.optimizer.param_groups]
    return f"{type(group.optimizer).__name__}, lr {_rates(rates)}"


def _scheduler(group: OptimizerGroup) -> str:
    if group.lr_scheduler is None:
        return "none"
    return f"{type(group.lr_scheduler).__name__}, lr {_rates(group.learning_rates())} at the next step"


def _rates(rates: Iterable[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in sorted(set(map(float, rates))))
