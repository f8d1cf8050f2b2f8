# Written by `twinkle plugins types`; do not edit.
"""Rollouts: the contract `Rollout`, and every installed rollout by name."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from twinkle._registry import lazy_names
from twinkle.data_format import Trajectory

__all__ = ["Rollout"]


class Rollout(ABC):
    """Continues trajectories turn by turn until each one ends."""

    @abstractmethod
    def __call__(self, trajectories: Sequence[Trajectory], **kwargs: Any) -> list[Trajectory]:
        """Return one finished trajectory for each given one, in order."""



from twinkle_agentic.rollout.api_multi_turn import APIMultiTurnRollout as APIMultiTurnRollout
from twinkle_agentic.rollout.multi_turn import MultiTurnRollout as MultiTurnRollout
from twinkle_agentic.rollout.multi_turn_condense import MultiTurnCondenseRollout as MultiTurnCondenseRollout
