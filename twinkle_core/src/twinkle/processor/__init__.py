"""Processors: the class `InputProcessor` (contract and component in one), and every installed processor by name."""

from twinkle._lazy import room
from twinkle.processor.base import InputProcessor

__all__ = ["InputProcessor"]

__getattr__, __dir__ = room(__name__, "processor")
