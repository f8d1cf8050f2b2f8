"""Published path of the contract of a rollout, which is defined in core."""

from twinkle.rollout import Rollout

__all__ = ["Rollout"]
