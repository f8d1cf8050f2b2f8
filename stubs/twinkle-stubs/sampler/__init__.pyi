# Written by `twinkle plugins types`; do not edit.
"""Samplers: the contract `Sampler`, and every installed sampler by name."""

from twinkle._registry import lazy_names
from twinkle.sampler.base import Sampler
from twinkle.sampler.base_engine import BaseSamplerEngine

__all__ = ["BaseSamplerEngine", "Sampler"]


from twinkle_transformers.sampler import TorchSampler as TorchSampler
from twinkle_transformers.sampling.async_engine import TorchSamplerEngine as TorchSamplerEngine
