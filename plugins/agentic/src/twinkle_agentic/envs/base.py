"""The contract of an environment, under its published path; it lies in core."""

from twinkle.env import Env, StepResult

__all__ = ["Env", "StepResult"]
