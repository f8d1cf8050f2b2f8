"""Samplers: the contract `Sampler`, and every installed sampler by name."""

from twinkle._registry import lazy_names
from twinkle.sampler.base import Sampler
from twinkle.sampler.base_engine import BaseSamplerEngine

__all__ = ["BaseSamplerEngine", "Sampler"]

__getattr__, __dir__ = lazy_names(__name__, "sampler")
