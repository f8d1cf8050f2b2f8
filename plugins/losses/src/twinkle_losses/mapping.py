"""The published table of losses by short name."""

from twinkle.loss import Loss
from twinkle_losses.bnpo import BNPOLoss
from twinkle_losses.chunked import ChunkedCrossEntropyLoss
from twinkle_losses.cispo import CISPOLoss
from twinkle_losses.cpo import CPOLoss
from twinkle_losses.cross_entropy import CrossEntropyLoss
from twinkle_losses.dpo import DPOLoss
from twinkle_losses.dr_grpo import DRGRPOLoss
from twinkle_losses.gkd import GKDLoss
from twinkle_losses.grpo import GRPOLoss
from twinkle_losses.gspo import GSPOLoss
from twinkle_losses.infonce import InfonceLoss
from twinkle_losses.liger import LigerFusedLinearCrossEntropyLoss
from twinkle_losses.mse import MSELoss
from twinkle_losses.orpo import ORPOLoss
from twinkle_losses.sapo import SAPOLoss
from twinkle_losses.simpo import SimPOLoss

torch_loss_mapping: dict[str, type[Loss]] = {
    "mse": MSELoss,
    "cross_entropy": CrossEntropyLoss,
    "chunked_cross_entropy": ChunkedCrossEntropyLoss,
    "liger_fused_linear_cross_entropy": LigerFusedLinearCrossEntropyLoss,
    "grpo": GRPOLoss,
    "gspo": GSPOLoss,
    "sapo": SAPOLoss,
    "cispo": CISPOLoss,
    "bnpo": BNPOLoss,
    "dr_grpo": DRGRPOLoss,
    "dpo": DPOLoss,
    "simpo": SimPOLoss,
    "cpo": CPOLoss,
    "orpo": ORPOLoss,
    "gkd": GKDLoss,
    "infonce": InfonceLoss,
}
"""Classes of losses; `set_loss` takes a class from here, or its name (`"GRPOLoss"`)."""
