"""Kernels: the contract `Kernel`, and every installed kernel by name."""

from twinkle._lazy import room
from twinkle.kernel.base import Kernel

__all__ = ["Kernel"]

__getattr__, __dir__ = room(__name__, "kernel")
