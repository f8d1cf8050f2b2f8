"""Rewards: the contract `Reward`, and every installed reward by name."""

from twinkle._registry import room
from twinkle.reward.base import Reward

__all__ = ["Reward"]

__getattr__, __dir__ = room(__name__, "reward")
