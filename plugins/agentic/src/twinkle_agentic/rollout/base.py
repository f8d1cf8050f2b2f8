"""The contract of a rollout, under its published path; it lies in core."""

from twinkle.rollout import Rollout

__all__ = ["Rollout"]
