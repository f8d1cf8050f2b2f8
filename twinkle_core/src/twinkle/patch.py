"""Patches: the base class `Patch`, the functions that apply and undo one, and every installed patch by name."""

from twinkle._registry import room

__getattr__, __dir__ = room(__name__, "patch")
