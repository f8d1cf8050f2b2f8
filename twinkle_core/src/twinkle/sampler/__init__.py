"""Samplers: the contract `Sampler`, and every installed sampler by name."""

from twinkle._registry import room
from twinkle.sampler.base import Sampler

__all__ = ["Sampler"]

__getattr__, __dir__ = room(__name__, "sampler")
