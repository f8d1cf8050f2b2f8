"""The weights of a model itself, by the names that they have without PEFT's wrappers."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

_WRAPPERS = (".base_layer", ".original_module")
_ADAPTERS = (".lora_", ".modules_to_save.", ".trainable_tokens")


def plain(path: str) -> str:
    """Return the path of a layer or weight without PEFT's wrappers."""
    for wrapper in _WRAPPERS:
        path = path.replace(f"{wrapper}.", ".").removesuffix(wrapper)
    return path


def base_weights(causal: Any) -> dict[str, Tensor]:
    """Return parameters and saved buffers of a Hugging Face model, adapters left out; tied ones under each name."""
    state: Mapping[str, Tensor] = causal.state_dict(keep_vars=True)
    return {plain(key): tensor for key, tensor in state.items() if not any(part in key for part in _ADAPTERS)}


def ties(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the first name of each weight that has several, by its other names."""
    first: dict[int, str] = {}
    return {name: first[id(t)] for name, t in weights.items() if first.setdefault(id(t), name) != name}
