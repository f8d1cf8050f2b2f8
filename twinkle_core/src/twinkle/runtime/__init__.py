"""Runtimes: the contract `Runtime`, `initialize` and the decorators, and every installed runtime by name."""

from twinkle._registry import lazy_names
from twinkle.platform import seed_everything
from twinkle.runtime.base import Runtime, RuntimeOptions
from twinkle.runtime.current import current_runtime, get_device_placement, initialize, is_master
from twinkle.runtime.remote import RemoteClass, RemoteFunction, remote_class, remote_function

__all__ = [
    "RemoteClass",
    "RemoteFunction",
    "Runtime",
    "RuntimeOptions",
    "current_runtime",
    "get_device_placement",
    "initialize",
    "is_master",
    "remote_class",
    "remote_function",
    "seed_everything",
]

__getattr__, __dir__ = lazy_names(__name__, "runtime")
