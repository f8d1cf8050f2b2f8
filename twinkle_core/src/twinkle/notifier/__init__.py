"""Notifiers: the contract `Notifier`, and every installed notifier by name."""

from twinkle._lazy import room
from twinkle.notifier.base import Notifier

__all__ = ["Notifier"]

__getattr__, __dir__ = room(__name__, "notifier")
