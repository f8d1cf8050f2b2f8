"""Patches: the base class `Patch`, the functions that apply and undo one, and every installed patch by name."""

from twinkle._registry import lazy_names

__getattr__, __dir__ = lazy_names(__name__, "patch")
