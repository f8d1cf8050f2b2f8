"""What the contract kit calls these components with: a small world, a sampler and a service that need no model."""

from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.data_format import Message, SampledSequence, SampleResponse, SamplingParams, Trajectory
from twinkle.env import Env, StepResult
from twinkle.sampler import Sampler
from twinkle_agentic.protocol.base import API
from twinkle_agentic.tools.calculator import CalculatorTool
from twinkle_agentic.tools.tool_manager import ToolManager

_CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "2 + 3"}}</tool_call>'


class CountdownEnv(Env):
    """Take 1, 2 or 3 from a number; who reaches 0 exactly is rewarded."""

    def __init__(self, start: int = 10) -> None:
        self.start = self.left = start

    def reset(self, trajectory: Trajectory | None = None) -> StepResult:
        """Start with `start`."""
        self.left = self.start
        return StepResult(f"There are {self.left}.")

    def step(self, tool_name: str, arguments: Mapping[str, Any]) -> StepResult:
        """Take some."""
        taken = int(arguments["number"])
        if taken not in (1, 2, 3):
            raise ValueError(f"number is {taken}; take 1, 2 or 3")
        self.left -= taken
        return StepResult(f"There are {self.left}.", float(self.left == 0), self.left <= 0)

    def tools(self) -> list[Any]:
        """Return the one tool: `take`."""
        number = {"type": "integer", "description": "How many: 1, 2 or 3."}
        parameters = {"type": "object", "properties": {"number": number}, "required": ["number"]}
        function = {"name": "take", "description": "Takes some away.", "parameters": parameters}
        return [{"type": "function", "function": function}]

    def evaluate(self, trajectories: Sequence[Trajectory], **kwargs: Any) -> list[float]:
        """Return 1 for each trajectory that ends with 0."""
        return [float(str(row["messages"][-1]["content"]).strip().endswith("0")) for row in trajectories]


class ScriptedSampler(Sampler):
    """Returns the same texts in each trajectory, one per turn; the probability of each token is one half.

    Args:
        texts: the texts; the last one is repeated.
        template: encodes and decodes.
    """

    def __init__(self, texts: Sequence[str], template: Any) -> None:
        self.texts, self.template = list(texts), template

    def sample(
        self,
        inputs: Any,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        adapter_name: Any = "",
        **kwargs: Any,
    ) -> list[SampleResponse]:
        """Return the next text of each row."""
        params = sampling_params if isinstance(sampling_params, SamplingParams) else SamplingParams()
        return [SampleResponse([self._next(row, params)]) for row in inputs]

    def set_template(self, template_cls: Any, **kwargs: Any) -> None:
        """Set the template."""
        self.template = template_cls

    def reset_prefix_cache(self) -> None:
        """Do nothing: nothing is kept."""

    def _next(self, row: Mapping[str, Any], params: SamplingParams) -> SampledSequence:
        turn = sum(message["role"] == "assistant" for message in row["messages"])
        tokenizer = self.template.tokenizer
        text = self.texts[min(turn, len(self.texts) - 1)] + tokenizer.eos_token
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        cut = params.max_tokens is not None and len(tokens) > params.max_tokens
        tokens = tokens[: params.max_tokens] if cut else tokens
        return SampledSequence(
            "length" if cut else "stop", tokens, [[(token, -0.6931471805599453)] for token in tokens]
        )


class ScriptedAPI(API):
    """Returns the same texts in each trajectory, one per turn."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = list(texts)

    def __call__(
        self, trajectory: Trajectory, sampling_params: SamplingParams | Mapping[str, Any] | None = None, **kwargs: Any
    ) -> Message:
        """Return the next text."""
        turn = sum(message["role"] == "assistant" for message in trajectory["messages"])
        return {"role": "assistant", "content": self.texts[min(turn, len(self.texts) - 1)]}


class EmbeddedWorld:
    """An environment as OpenEnv's packages have them: `reset` and `step` return an observation with reward and end."""

    class Observation:
        """What is seen."""

        def __init__(self, text: str, reward: float | None = None, done: bool = False) -> None:
            self.text, self.reward, self.done = text, reward, done
            self.metadata: dict[str, Any] = {}

    def __init__(self, word: str = "yes") -> None:
        self.word = word

    def reset(self, **kwargs: Any) -> "EmbeddedWorld.Observation":
        """Begin."""
        return self.Observation("say the word")

    def step(self, action: Mapping[str, Any]) -> "EmbeddedWorld.Observation":
        """Say a word."""
        right = action.get("action") == self.word
        return self.Observation("right" if right else "wrong", float(right), right)


def rollout() -> dict[str, Any]:
    """A turn with a call, and one with the answer."""
    from twinkle.template import Template
    from twinkle.testing import tiny_tokenizer

    template = Template(tokenizer=tiny_tokenizer())
    sampler = ScriptedSampler([_CALL, "It is 5."], template)
    return {"kwargs": {"sampler": sampler, "tool_manager": ToolManager([CalculatorTool()])}}


def condense_rollout() -> dict[str, Any]:
    """The same with questions that are condensed where they are long."""
    from twinkle_agentic.chunker import NativeChunker
    from twinkle_agentic.condenser import KeywordCondenser

    kwargs = rollout()["kwargs"]
    parts = {"template": kwargs["sampler"].template, "chunker": NativeChunker(), "condenser": KeywordCondenser()}
    return {"kwargs": {**kwargs, **parts}}


def extract_condensed() -> dict[str, Any]:
    """One condensed block."""
    from twinkle_agentic.data_format import Chunk, Chunks

    raw = {"condensed": True, "original": "blue and green"}
    chunks = Chunks([Chunk(type="text", content="blue", role="user", raw=raw)])
    return {"kwargs": {"chunks": chunks}, "arguments": {"blocks": 1}, "result": "blue and green"}


def api_rollout() -> dict[str, Any]:
    """The same with a service."""
    return {"kwargs": {"api": ScriptedAPI([_CALL, "It is 5."]), "tool_manager": ToolManager([CalculatorTool()])}}


CALCULATOR = {"arguments": {"expression": "(2 + 3) * 4"}, "result": "20"}


def env_tool() -> dict[str, Any]:
    """One action of the small world."""
    (take,) = (info["function"] for info in CountdownEnv().tools())
    kwargs = {"env": CountdownEnv(), "tool_name": take["name"], "parameters": take["parameters"]}
    return {"kwargs": kwargs, "arguments": {"number": 3}, "result": "There are 7."}


OPEN_ENV = {
    "kwargs": {"env_cls": EmbeddedWorld, "env_kwargs": {"word": "blue"}},
    "actions": [("env_action", {"action": "red"}), ("env_action", {"action": "blue"})],
}
REASONING_GYM = {
    "kwargs": {"dataset": "basic_arithmetic", "size": 5},
    "actions": [("answer", {"answer": "4"})],
    "skip": {"scores": "it scores trajectories that name their question in user_data"},
}
