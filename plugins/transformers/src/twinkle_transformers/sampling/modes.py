"""Puts a module into the state that sampling needs, for the duration of a block, and back exactly as it was."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from twinkle_transformers.adapters import tuned_places


@contextmanager
def with_adapter(module: nn.Module, adapter: str | None) -> Iterator[None]:
    """Let one adapter ("": none) answer for the duration of a block. PEFT's switches also change `requires_grad`."""
    if adapter is None or not isinstance(module, PeftModel):
        yield
        return
    flags = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    tuner: Any = module.base_model
    active, shown = list(tuner.active_adapters), module.active_adapter
    try:
        if adapter == "":
            with module.disable_adapter():
                yield
        else:
            module.set_adapter(adapter)
            yield
    finally:
        tuner.set_adapter(active)
        module.active_adapter = shown
        for parameter, wanted in flags:
            parameter.requires_grad_(wanted)


@contextmanager
def silent(module: nn.Module) -> Iterator[None]:
    """Let no adapter of PEFT answer for the duration of a block, without touching what is trained."""
    if not isinstance(module, PeftModel):
        yield
        return
    layers: list[Any] = [part for _, part in tuned_places(module.get_base_model())]
    before = [layer._disable_adapters for layer in layers]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer, was in zip(layers, before, strict=True):
            layer._disable_adapters = was


def active_adapters(module: PeftModel) -> list[str]:
    """Return the adapters that answer now."""
    tuner: Any = module.base_model
    layers = (part for _, part in tuned_places(module.get_base_model()) if isinstance(part, BaseTunerLayer))
    silent = any(part.disable_adapters for part in layers)
    return [] if silent else list(tuner.active_adapters)


def has_adapters(module: nn.Module) -> bool:
    """Say whether layers of PEFT are inside."""
    return any(isinstance(part, BaseTunerLayer) for part in module.modules())
