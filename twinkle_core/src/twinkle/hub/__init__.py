"""Hubs: the contract `Hub`, every installed hub by name, and `local_model`, which turns any model id into a folder."""

from twinkle._lazy import room
from twinkle.hub.base import Hub
from twinkle.hub.local import local_model, open_hub

__all__ = ["Hub", "local_model", "open_hub"]

__getattr__, __dir__ = room(__name__, "hub")
