"""Models: the contract `TwinkleModel`, and every installed model by name."""

from twinkle._lazy import room
from twinkle.model.base import TwinkleModel

__all__ = ["TwinkleModel"]

__getattr__, __dir__ = room(__name__, "model")
