"""The puzzles of reasoning-gym: generated questions of a task, each with a scoring function."""

from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.data_format import Message, Trajectory, pack_value, user_data_get
from twinkle.env import Env, StepResult
from twinkle.errors import ArgumentError, DataError, RequirementMissing

_KEY = "reasoning_gym"


class ReasoningGymEnv(Env):
    """One data set of reasoning-gym; an episode is one question, answered by the tool `answer`.

    `reset` asks the question whose number stands in the trajectory's `user_data` under `reasoning_gym`, else the first.
    The reward is reasoning-gym's own score, from 0 to 1. `evaluate` scores trajectories that ended with an assistant's
    turn: the text in the last `<answer>...</answer>`, else all of it.

    Args:
        dataset: the name of a data set, such as `basic_arithmetic`.
        size: number of questions.
        seed: of the generated questions: the same seed, the same questions.
        config: further options of the data set.

    Raises:
        ArgumentError: there is no such data set.
    """

    def __init__(self, dataset: str, size: int = 500, seed: int = 0, config: Mapping[str, Any] | None = None) -> None:
        try:
            from reasoning_gym import create_dataset
        except ImportError as error:
            raise RequirementMissing(
                "ReasoningGymEnv needs reasoning-gym: pip install 'twinkle-agentic[envs]'"
            ) from error
        try:
            self._data = create_dataset(dataset, size=size, seed=seed, **(config or {}))
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"ReasoningGymEnv: {dataset!r}: {error}") from error
        self.dataset, self.size = dataset, size
        self._index = 0

    def trajectory(self, index: int, system: str | None = None) -> Trajectory:
        """Return the prompt of a question, which `reset` and `evaluate` know again.

        Args:
            index: its number, from 0.
            system: a system message, such as how to write the answer.
        """
        entry = self._entry(index)
        question: Message = {"role": "user", "content": str(entry["question"])}
        before: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        return {"messages": [*before, question], "user_data": [(_KEY, pack_value(index))]}

    def reset(self, trajectory: Trajectory | None = None) -> StepResult:
        """Ask the question of the trajectory."""
        self._index = int(user_data_get((trajectory or {}).get("user_data"), _KEY, 0))
        return StepResult(str(self._entry(self._index)["question"]), info={"index": self._index})

    def step(self, tool_name: str, arguments: Mapping[str, Any]) -> StepResult:
        """Score the answer, which ends the episode."""
        answer = arguments.get("answer")
        if answer is None:
            raise ArgumentError(f"{tool_name} takes 'answer'; found: {', '.join(map(str, arguments)) or 'nothing'}")
        score = self._score(str(answer), self._index)
        return StepResult(f"Your answer was given {score:g} of 1.", score, True, {"index": self._index})

    def tools(self) -> list[Any]:
        """Return the one tool: `answer`."""
        answer = {"type": "string", "description": "The answer alone."}
        function = {
            "name": "answer",
            "description": "Gives the answer to the question.",
            "parameters": {"type": "object", "properties": {"answer": answer}, "required": ["answer"]},
        }
        return [{"type": "function", "function": function}]

    def evaluate(self, trajectories: Sequence[Trajectory], **kwargs: Any) -> list[float]:
        """Score the last turn of each trajectory against its question.

        Raises:
            DataError: a trajectory does not say which question it is.
        """
        return [self._evaluated(row, trajectory) for row, trajectory in enumerate(trajectories)]

    def _evaluated(self, row: int, trajectory: Trajectory) -> float:
        index = user_data_get(trajectory.get("user_data"), _KEY)
        if index is None:
            raise DataError(
                f"trajectory {row} has no {_KEY!r} in user_data, so its question is unknown; make prompts by "
                "ReasoningGymEnv.trajectory(index)"
            )
        turns = [message for message in trajectory["messages"] if message["role"] == "assistant"]
        text = str(turns[-1]["content"]) if turns else ""
        return self._score(_marked(text).strip(), int(index))

    def _entry(self, index: int) -> Any:
        if not 0 <= index < self.size:
            raise ArgumentError(f"{self.dataset} has no question {index}; it has 0 to {self.size - 1}")
        return self._data[index]

    def _score(self, answer: str, index: int) -> float:
        return float(self._data.score_answer(answer=answer, entry=self._entry(index)))


def _marked(text: str) -> str:
    """Return the content of the last `<answer>...</answer>`, or the whole text without one."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return text if start < 0 else text[start + len("<answer>") : end]
