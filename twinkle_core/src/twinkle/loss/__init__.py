"""Losses: the contract `Loss`, and every installed loss by name."""

from typing import TYPE_CHECKING

from twinkle._lazy import room
from twinkle.data_format import LossOutput
from twinkle.loss.base import FusedLoss, HeadProduct, Loss

__all__ = ["FusedLoss", "HeadProduct", "Loss", "LossOutput"]

__getattr__, __dir__ = room(__name__, "loss")

# Names of our own plugins, for editors and type checkers; scripts/type_names.py writes them.
if TYPE_CHECKING:
    from twinkle_losses.chunked import ChunkedCrossEntropyLoss as ChunkedCrossEntropyLoss
    from twinkle_losses.cross_entropy import CrossEntropyLoss as CrossEntropyLoss
    from twinkle_losses.dpo import DPOLoss as DPOLoss
    from twinkle_losses.grpo import GRPOLoss as GRPOLoss
    from twinkle_losses.infonce import InfonceLoss as InfonceLoss
    from twinkle_losses.liger import LigerFusedLinearCrossEntropyLoss as LigerFusedLinearCrossEntropyLoss
    from twinkle_losses.mse import MSELoss as MSELoss
