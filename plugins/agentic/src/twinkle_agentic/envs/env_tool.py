"""An environment's actions as tools, and the episode that they share."""

import copy
import math
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from twinkle.data_format import Trajectory
from twinkle.env import Env, StepResult
from twinkle.errors import ArgumentError, ComponentTypeError
from twinkle.tool import Tool, ToolInfo


class Episode:
    """What happened in an environment since it was reset: the answers to all steps, in order.

    One step runs at a time: while one that was given up as hung still runs, further ones are refused.

    Attributes:
        env: the environment.
        results: the answers to the steps.
    """

    def __init__(self, env: Env) -> None:
        self.env = env
        self.results: list[StepResult] = []
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"env": self.env, "results": self.results}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.env, self.results, self._lock = state["env"], state["results"], threading.Lock()

    @property
    def rewards(self) -> list[float]:
        """The reward of each step."""
        return [float(result.reward) for result in self.results]

    @property
    def reward(self) -> float:
        """The sum of the steps' rewards."""
        return math.fsum(self.rewards)

    @property
    def done(self) -> bool:
        """Whether the last step ended the episode."""
        return bool(self.results) and self.results[-1].done

    def reset(self, trajectory: Trajectory | None = None) -> StepResult:
        """Reset."""
        with self._alone():
            self.results = []
            return checked(self.env, self.env.reset(trajectory))

    def step(self, tool_name: str, arguments: Mapping[str, Any]) -> StepResult:
        """Act once.

        Raises:
            RuntimeError: the episode is over, or the step before still runs.
            ComponentTypeError: the environment answers with something else than a finite `StepResult`.
        """
        with self._alone():
            if self.done:
                raise RuntimeError("the episode is over")
            results = self.results
            result = checked(self.env, self.env.step(tool_name, arguments))
            results.append(result)
            return result

    def _alone(self) -> "_Alone":
        return _Alone(self._lock)


class _Alone:
    """Holds a lock, or refuses at once."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("the environment is still busy with the step before")

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def checked(env: Env, result: Any) -> StepResult:
    """Return what an environment answered, with a finite number for a reward.

    Raises:
        ComponentTypeError: it is not a `StepResult`, or its reward is not a number.
    """
    name = type(env).__name__
    if not isinstance(result, StepResult):
        raise ComponentTypeError(f"{name} answered with a {type(result).__name__}; return twinkle.env.StepResult")
    reward = _plain(result.reward)
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise ComponentTypeError(f"{name} gave the reward {reward!r:.60}; it must be a finite number")
    return replace(result, reward=reward)


def _plain(reward: Any) -> Any:
    """Convert a number of NumPy or torch to a Python number; return other values unchanged."""
    try:
        return reward.item() if hasattr(reward, "item") else reward
    except (ValueError, RuntimeError):  # an array of several
        return reward


class EnvTool(Tool):
    """An action of an environment as a tool: a call is a step, and the observation is its result.

    Attributes:
        env: the environment.
        episode: what happened in it, shared by all tools of `from_env`.
        tool_name: name of the action in the environment.
    """

    def __init__(
        self,
        env: Env,
        tool_name: str = "env_action",
        description: str = "Acts in the environment and returns what is observed.",
        parameters: Mapping[str, Any] | None = None,
        *,
        episode: Episode | None = None,
    ) -> None:
        """Make a tool.

        Args:
            env: the environment.
            tool_name: the name of the action.
            description: what it does, for the model.
            parameters: JSON schema of its arguments; None is one argument `action`, a text.
            episode: that of other tools of the same environment; None begins one.

        Raises:
            ArgumentError: `env` is no environment.
        """
        if not isinstance(env, Env):
            raise ArgumentError(f"env is a {type(env).__name__}; it must be a twinkle.env.Env")
        self.env, self.tool_name = env, tool_name
        self.episode = Episode(env) if episode is None else episode
        action = {"type": "object", "properties": {"action": {"type": "string"}}, "required": ["action"]}
        self._function = {
            "name": tool_name,
            "description": description,
            "parameters": copy.deepcopy(dict(action if parameters is None else parameters)),
        }

    @classmethod
    def from_env(cls, env: Env) -> "list[EnvTool]":
        """Return one tool for each action that the environment lists, all of one episode."""
        episode, tools = Episode(env), []
        for entry in env.tools():
            info: Any = entry.tool_info() if isinstance(entry, Tool) else entry
            function = info["function"]
            parameters = function.get("parameters") or {"type": "object", "properties": {}}
            description = function.get("description") or function["name"]
            tools.append(cls(env, function["name"], description, parameters, episode=episode))
        return tools

    def __call__(self, tool_name: str, arguments: Mapping[str, Any]) -> str:
        """Take the step and return its observation."""
        return self.episode.step(self.tool_name, arguments).observation

    def tool_info(self) -> ToolInfo:
        """Return the schema that the model sees."""
        return {"type": "function", "function": copy.deepcopy(self._function)}  # type: ignore[typeddict-item]

    def reset(self, trajectory: Trajectory | None = None) -> StepResult:
        """Begin a new episode, for all tools of it."""
        return self.episode.reset(trajectory)

    @property
    def last_result(self) -> StepResult | None:
        """The answer to the last step of the episode, by whichever of its tools."""
        return self.episode.results[-1] if self.episode.results else None

    @property
    def done(self) -> bool:
        """Whether the episode is over."""
        return self.episode.done

    @property
    def episode_reward(self) -> float:
        """The sum of the rewards of the episode's steps."""
        return self.episode.reward
