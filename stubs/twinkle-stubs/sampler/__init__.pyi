# Written by `twinkle plugins types`; do not edit.
"""Samplers: the contract `Sampler`, and every installed sampler by name."""

from twinkle._registry import lazy_names
from twinkle.sampler.base import Sampler

__all__ = ["Sampler"]


from twinkle_transformers.sampler import TorchSampler as TorchSampler
