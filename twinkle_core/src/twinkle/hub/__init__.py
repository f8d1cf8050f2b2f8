"""Hubs: the contract `Hub`, every installed hub by name, and `local_model`, which turns any model id into a folder."""

from typing import Any

from twinkle._registry import lazy_names
from twinkle.hub.base import Hub
from twinkle.hub.local import local_folder, local_model, open_hub

__all__ = ["Hub", "local_folder", "local_model", "open_hub"]

_PUBLISHED = {
    "HFHub": "hf",
    "MSHub": "ms",
    "FileHub": "file",
}  # published class names; the components are named by scheme

_component, __dir__ = lazy_names(__name__, "hub", _PUBLISHED)


def __getattr__(name: str) -> Any:
    return _component(_PUBLISHED.get(name, name))
