# Written by `twinkle plugins types`; do not edit.
"""Advantages: the contract `Advantage`, and every installed estimator by name."""

from twinkle._registry import lazy_names
from twinkle.advantage.base import Advantage

__all__ = ["Advantage"]


from twinkle_rewards.advantages.gae import GAEAdvantage as GAEAdvantage
from twinkle_rewards.advantages.grpo import GRPOAdvantage as GRPOAdvantage
from twinkle_rewards.advantages.reinforce import ReinforcePlusPlusAdvantage as ReinforcePlusPlusAdvantage
from twinkle_rewards.advantages.rloo import RLOOAdvantage as RLOOAdvantage
