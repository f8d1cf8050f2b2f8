"""Rewards: the contract `Reward`, and every installed reward by name."""

from twinkle._registry import lazy_names
from twinkle.reward.base import Reward

__all__ = ["Reward"]

__getattr__, __dir__ = lazy_names(__name__, "reward")
