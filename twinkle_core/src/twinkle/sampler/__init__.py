"""Samplers: the contract `Sampler`, and every installed sampler by name."""

from twinkle._registry import lazy_names
from twinkle.sampler.base import Sampler

__all__ = ["Sampler"]

__getattr__, __dir__ = lazy_names(__name__, "sampler")
