# Written by `twinkle plugins types`; do not edit.
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

from twinkle_data.builtin import BuiltinHub as _builtin
from twinkle_data.gguf import converted as _convert_gguf
from twinkle_hub.folder import FileHub as _file
from twinkle_hub.hugging_face import HFHub as _hf
from twinkle_hub.model_scope import MSHub as _ms
from twinkle_hub.operation import HubOperation as HubOperation
from twinkle_hub.uploads import Upload as Upload
builtin = _builtin
convert_gguf = _convert_gguf
file = _file
hf = _hf
ms = _ms
