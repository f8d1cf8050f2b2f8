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
    """The result of a step: text, reward, whether the episode is over, and further information."""

    observation: str = ""
    reward: float = 0.0
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)


class Env(ABC):
    """An environment that a model acts in by calling tools."""

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
        """Score finished trajectories; optional for an environment that gives rewards for steps."""
        raise NotImplementedError(f"{type(self).__name__} scores steps only: it defines no evaluate()")

    def close(self) -> None:  # noqa: B027 - most environments have nothing to release
        """Release what the environment holds; by default nothing."""


__getattr__, __dir__ = lazy_names(__name__, "env")
