"""Losses: the contract `Loss`, and every installed loss by name."""

from twinkle._registry import lazy_names
from twinkle.data_format import LossOutput
from twinkle.loss.base import FusedLoss, HeadProduct, Loss

__all__ = ["FusedLoss", "HeadProduct", "Loss", "LossOutput"]

__getattr__, __dir__ = lazy_names(__name__, "loss")
