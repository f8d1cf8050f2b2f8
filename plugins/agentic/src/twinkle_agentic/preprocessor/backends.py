"""Models that filters ask: behind a service with OpenAI's protocol, or a sampler of this process."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.data_format import SamplingParams, split_reasoning
from twinkle.errors import Unsupported
from twinkle_agentic.protocol import OpenAI


class LLMBackend(ABC):
    """A model that answers conversations."""

    @abstractmethod
    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, temperature: float = 0.0, max_tokens: int = 16, n: int = 1
    ) -> list[dict[str, str]]:
        """Return `n` answers, each with `content` and `reasoning_content`.

        Raises:
            TwinkleError: there is no answer.
        """

    def prompt_logprobs(self, messages: Sequence[Mapping[str, Any]]) -> list[Any] | None:
        """Return the log-probability of each token of a conversation, None for the first; None if it is not known."""
        return None


class OpenAIBackend(LLMBackend):
    """A service with OpenAI's protocol.

    Args:
        endpoint: its address, without `/v1`.
        model: its name of the model.
        api_key: "" sends none.
        timeout: seconds for a request.
    """

    def __init__(self, endpoint: str, model: str = "default", api_key: str = "", timeout: float = 120.0) -> None:
        base = endpoint.rstrip("/").removesuffix("/v1") + "/v1"
        self.model = model
        self._service = OpenAI(model, api_key, base, {"timeout": timeout})

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, temperature: float = 0.0, max_tokens: int = 16, n: int = 1
    ) -> list[dict[str, str]]:
        """Return `n` answers.

        Raises:
            APIError: the service does not answer.
        """
        conversation: Any = {"messages": list(messages)}
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, num_samples=n)
        answers: Any = self._service(conversation, params)
        return [_answer(answer) for answer in ([answers] if isinstance(answers, Mapping) else answers)]


class SamplerBackend(LLMBackend):
    """A sampler with a template.

    Args:
        sampler: the sampler.
    """

    def __init__(self, sampler: Any, embed_endpoint: str = "", embed_model: str = "bge-m3") -> None:
        if embed_endpoint:
            raise Unsupported(
                f"SamplerBackend(embed_endpoint=, embed_model={embed_model!r}): no filter uses embeddings"
            )
        self.sampler = sampler

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, temperature: float = 0.0, max_tokens: int = 16, n: int = 1
    ) -> list[dict[str, str]]:
        """Return `n` answers."""
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, num_samples=n)
        [response] = self.sampler.sample([{"messages": list(messages)}], params)
        texts = [
            sequence.decoded
            if sequence.decoded is not None
            else self.sampler.template.decode(sequence.tokens, skip_special_tokens=True)
            for sequence in response.sequences
        ]
        return [_answer({"content": text}) for text in texts]

    def prompt_logprobs(self, messages: Sequence[Mapping[str, Any]]) -> list[Any] | None:
        """Return the log-probability of each token of a conversation."""
        params = SamplingParams(max_tokens=0, prompt_logprobs=1)
        row: Any = {"messages": list(messages)}
        if messages and messages[-1].get("role") == "assistant":  # no turn follows, for which a sampler would prepare
            row = {"input_ids": list(self.sampler.template.encode(row)["input_ids"])}
        [response] = self.sampler.sample([row], params)
        return response.prompt_logprobs  # type: ignore[no-any-return]


def _answer(message: Mapping[str, Any]) -> dict[str, str]:
    said = {"role": "assistant", "content": str(message.get("content") or "")}
    if message.get("reasoning_content"):
        said["reasoning_content"] = str(message["reasoning_content"])
    read = split_reasoning(said)
    return {"content": read["content"], "reasoning_content": read.get("reasoning_content") or ""}
