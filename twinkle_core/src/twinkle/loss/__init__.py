"""Losses: the contract `Loss`, and every installed loss by name."""

from typing import TYPE_CHECKING

from twinkle._lazy import room
from twinkle.data_format import LossOutput
from twinkle.loss.base import FusedLoss, HeadProduct, Loss

__all__ = ["FusedLoss", "HeadProduct", "Loss", "LossOutput"]

__getattr__, __dir__ = room(__name__, "loss")

# Names of our own plugins, for editors and type checkers; scripts/type_names.py writes them.
if TYPE_CHECKING:
    from twinkle_losses.cross_entropy import CrossEntropyLoss as CrossEntropyLoss
