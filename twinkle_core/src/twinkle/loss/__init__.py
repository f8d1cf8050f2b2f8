"""Losses: the contract `Loss`, and every installed loss by name."""

from twinkle._registry import room
from twinkle.data_format import LossOutput
from twinkle.loss.base import FusedLoss, HeadProduct, Loss

__all__ = ["FusedLoss", "HeadProduct", "Loss", "LossOutput"]

__getattr__, __dir__ = room(__name__, "loss")
