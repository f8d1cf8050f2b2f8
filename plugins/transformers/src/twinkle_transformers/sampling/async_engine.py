"""`TorchSamplerEngine`: a `TorchSampler` for callers that await their results."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from twinkle.data_format import SampleResponse, SamplingParams
from twinkle.errors import Unsupported
from twinkle.sampler import BaseSamplerEngine


class TorchSamplerEngine(BaseSamplerEngine):
    """Samples with a `TorchSampler`; concurrent calls share its steps.

    Args:
        sampler: the sampler, which may be used directly as well.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

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
        """Sample from one prompt; see `BaseSamplerEngine.sample`.

        Args:
            prompt_token_ids: see the contract.
            sampling_params: see the contract; `num_samples` replaces theirs if it is not 1.
            num_samples: see the contract.
            logprobs: see the contract.
            include_prompt_logprobs: see the contract.
            topk_prompt_logprobs: see the contract.
            adapter_uri: folder of a PEFT adapter.
            request_id: accepted; this engine writes no log of single requests.
            images: none: this engine reads text.
            videos: none.

        Raises:
            Unsupported: images or videos.
        """
        if images or videos:
            raise Unsupported("TorchSamplerEngine reads text; leave images and videos out")
        given = sampling_params
        params = given if isinstance(given, SamplingParams) else SamplingParams.from_dict(given)
        if num_samples != 1:
            params = replace(params, num_samples=num_samples)
        scores = max(int(include_prompt_logprobs), topk_prompt_logprobs)
        params = replace(
            params, logprobs=(params.logprobs or 1) if logprobs else None,
            prompt_logprobs=max(params.prompt_logprobs or 0, scores) or None,
        )  # fmt: skip
        handle = self.sampler.submit({"input_ids": list(prompt_token_ids)}, params, adapter_path=adapter_uri)
        try:
            response: SampleResponse = await asyncio.to_thread(handle.result)
        finally:
            handle.cancel()
        return response

    async def get_tokenizer(self) -> Any:
        """Return the tokenizer of the sampler's template."""
        return self.sampler.template.tokenizer
