"""Notifiers: the contract `Notifier`, `notify_exception`, and every installed notifier by name."""

from twinkle._lazy import room
from twinkle.notifier.base import Notifier
from twinkle.notifier.failures import notify_exception

__all__ = ["Notifier", "notify_exception"]

__getattr__, __dir__ = room(__name__, "notifier")
