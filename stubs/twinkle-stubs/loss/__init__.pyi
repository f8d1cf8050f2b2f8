# Written by `twinkle plugins types`; do not edit.
"""Losses: the contract `Loss`, and every installed loss by name."""

from twinkle._registry import lazy_names
from twinkle.data_format import LossOutput
from twinkle.loss.base import FusedLoss, HeadProduct, Loss

__all__ = ["FusedLoss", "HeadProduct", "Loss", "LossOutput"]


from twinkle_losses.bnpo import BNPOLoss as BNPOLoss
from twinkle_losses.bnpo import DAPOLoss as DAPOLoss
from twinkle_losses.chunked import ChunkedCrossEntropyLoss as ChunkedCrossEntropyLoss
from twinkle_losses.cispo import CISPOLoss as CISPOLoss
from twinkle_losses.cpo import CPOLoss as CPOLoss
from twinkle_losses.cross_entropy import CrossEntropyLoss as CrossEntropyLoss
from twinkle_losses.dpo import DPOLoss as DPOLoss
from twinkle_losses.dr_grpo import DRGRPOLoss as DRGRPOLoss
from twinkle_losses.gkd import GKDLoss as GKDLoss
from twinkle_losses.grpo import GRPOLoss as GRPOLoss
from twinkle_losses.gspo import GSPOLoss as GSPOLoss
from twinkle_losses.infonce import InfonceLoss as InfonceLoss
from twinkle_losses.liger import LigerFusedLinearCrossEntropyLoss as LigerFusedLinearCrossEntropyLoss
from twinkle_losses.mapping import torch_loss_mapping as torch_loss_mapping
from twinkle_losses.mse import MSELoss as MSELoss
from twinkle_losses.orpo import ORPOLoss as ORPOLoss
from twinkle_losses.ppo import PPOLoss as PPOLoss
from twinkle_losses.reinforce import ReinforceLoss as ReinforceLoss
from twinkle_losses.sapo import SAPOLoss as SAPOLoss
from twinkle_losses.simpo import SimPOLoss as SimPOLoss
from twinkle_losses.tinker.cross_entropy import CrossEntropy as _cross_entropy
from twinkle_losses.tinker.gspo import Gspo as _gspo
from twinkle_losses.tinker.policy import Cispo as _cispo
from twinkle_losses.tinker.policy import Dro as _dro
from twinkle_losses.tinker.policy import ImportanceSampling as _importance_sampling
from twinkle_losses.tinker.policy import Ppo as _ppo
from twinkle_losses.tinker.stable import StableReinforce as _stable_reinforce
from twinkle_losses.value import ValueLoss as ValueLoss
cispo = _cispo
cross_entropy = _cross_entropy
dro = _dro
gspo = _gspo
importance_sampling = _importance_sampling
ppo = _ppo
stable_reinforce = _stable_reinforce
