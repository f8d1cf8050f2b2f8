"""Environments: the contract `Env` with its `StepResult`, and every installed environment by name."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from twinkle._registry import lazy_names
from twinkle.data_format import Trajectory

__all__ = ["Env", "StepResult"]


@dataclass
class StepResult:
    """What an environment answers: text, reward, whether the episode is over, and anything else."""

    observation: str = ""
    reward: float = 0.0
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)


class Env(ABC):
    """A world that a model acts in by calling tools."""

    @abstractmethod
    def reset(self, trajectory: Trajectory | None = None) -> StepResult:
        """Begin an episode."""

    @abstractmethod
    def step(self, tool_name: str, arguments: Mapping[str, Any]) -> StepResult:
        """Act once."""

    @abstractmethod
    def tools(self) -> list[Any]:
        """Return the tools that act on this environment."""

    def evaluate(self, trajectories: Sequence[Trajectory], **kwargs: Any) -> list[float]:
        """Score finished trajectories; an environment that rewards steps only need not define it."""
        raise NotImplementedError(f"{type(self).__name__} scores steps only: it defines no evaluate()")

    def close(self) -> None:  # noqa: B027 - most environments hold nothing
        """Release what the environment holds; by default nothing."""


__getattr__, __dir__ = lazy_names(__name__, "env")
