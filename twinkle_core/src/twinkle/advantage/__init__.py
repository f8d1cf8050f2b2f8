"""Advantages: the contract `Advantage`, and every installed estimator by name."""

from typing import TYPE_CHECKING

from twinkle._lazy import room
from twinkle.advantage.base import Advantage

__all__ = ["Advantage"]

__getattr__, __dir__ = room(__name__, "advantage")

# Names of our own plugins, for editors and type checkers; scripts/type_names.py writes them.
if TYPE_CHECKING:
    from twinkle_rewards.advantages.gae import GAEAdvantage as GAEAdvantage
    from twinkle_rewards.advantages.grpo import GRPOAdvantage as GRPOAdvantage
    from twinkle_rewards.advantages.reinforce import ReinforcePlusPlusAdvantage as ReinforcePlusPlusAdvantage
    from twinkle_rewards.advantages.rloo import RLOOAdvantage as RLOOAdvantage
