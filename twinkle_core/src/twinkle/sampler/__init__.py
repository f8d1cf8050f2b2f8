"""Samplers: the contract `Sampler`, and every installed sampler by name."""

from typing import TYPE_CHECKING

from twinkle._lazy import room
from twinkle.sampler.base import Sampler

__all__ = ["Sampler"]

__getattr__, __dir__ = room(__name__, "sampler")

# Names of our own plugins, for editors and type checkers; scripts/type_names.py writes them.
if TYPE_CHECKING:
    from twinkle_transformers.sampler import TorchSampler as TorchSampler
