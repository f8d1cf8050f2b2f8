"""Published path of the contract of an environment, which is defined in core."""

from twinkle.env import Env, StepResult

__all__ = ["Env", "StepResult"]
