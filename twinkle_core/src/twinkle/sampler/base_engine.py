"""The contract of an asynchronous sampling engine: tokens in, tokens out, many requests at a time."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from twinkle.data_format import SampleResponse, SamplingParams


class BaseSamplerEngine(ABC):
    """Samples from one model for concurrent callers; a sampler encodes and decodes around it.

    Only `sample` and `get_tokenizer` are required. The other methods raise `Unsupported` unless an engine has them.
    """

    @abstractmethod
    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams | Mapping[str, Any],
        *,
        num_samples: int = 1,
        logprobs: bool = True,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        adapter_uri: str | None = None,
        request_id: str | None = None,
        images: Sequence[Any] | None = None,
        videos: Sequence[Any] | None = None,
    ) -> SampleResponse:
        """Sample from one prompt.

        Args:
            prompt_token_ids: tokens of the prompt, at least one.
            sampling_params: sampling parameters; a mapping is read by `SamplingParams.from_dict`.
            num_samples: number of sequences.
            logprobs: whether to return the log-probability of each sampled token.
            include_prompt_logprobs: whether to score the prompt.
            topk_prompt_logprobs: number of most probable tokens to return at each token of the prompt.
            adapter_uri: the adapter to sample with; None is the engine's default.
            request_id: name of the request in logs.
            images: images of the prompt, for models that read them.
            videos: videos of the prompt, likewise.
        """

    @abstractmethod
    async def get_tokenizer(self) -> Any:
        """Return the tokenizer of the model."""

    async def update_weights(self, weights: Iterable[tuple[str, Any]], **kwargs: Any) -> None:
        """Replace weights by name."""
        self._refuse("update_weights")

    async def save_weights_for_sampler(self, path: str, **kwargs: Any) -> None:
        """Write the present weights to a folder from which samplers read them."""
        self._refuse("save_weights_for_sampler")

    async def sleep(self, level: int = 1) -> None:
        """Free the memory of the device; level 2 also frees that of the weights."""
        self._refuse("sleep")

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory again."""
        self._refuse("wake_up")

    def _refuse(self, method: str) -> None:
        from twinkle.errors import Unsupported

        raise Unsupported(f"{type(self).__name__} has no {method}; use an engine that has it, or a new engine")
