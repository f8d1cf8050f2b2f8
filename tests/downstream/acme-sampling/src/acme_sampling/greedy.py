"""A sampler in its simplest form: no cache, no noise, one row at a time."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from twinkle import registry
from twinkle.data_format import SampledSequence, SampleResponse, SamplingParams
from twinkle.errors import ArgumentError
from twinkle.sampler import Sampler


class AcmeGreedySampler(Sampler):
    """Decodes greedily with the module of a live model.

    Args:
        model: a model that trains, whose `model` is a module of transformers.
    """

    def __init__(self, model: Any) -> None:
        self.module = model.model
        self.template: Any = None

    def set_template(self, template_cls: Any, **kwargs: Any) -> None:
        """Set what encodes trajectories and decodes tokens."""
        self.template = registry().build(template_cls, "template", **kwargs)

    def reset_prefix_cache(self) -> None:
        """There is none."""

    @torch.no_grad()
    def sample(
        self,
        inputs: Any,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        adapter_name: str = "",
        **kwargs: Any,
    ) -> list[SampleResponse]:
        """Return one response of one sequence for each input."""
        if adapter_name or kwargs:
            raise ArgumentError(f"AcmeGreedySampler knows no {adapter_name or ', '.join(kwargs)}")
        params = SamplingParams.from_dict(sampling_params) if isinstance(sampling_params, Mapping) else sampling_params
        count = params.max_tokens if params is not None and params.max_tokens is not None else 16
        rows = inputs if isinstance(inputs, Sequence) else [inputs]
        return [self._respond([*map(int, row["input_ids"])], count) for row in rows]

    def _respond(self, prompt: list[int], count: int) -> SampleResponse:
        tokens: list[int] = []
        logprobs: list[list[tuple[int, float]]] = []
        for _ in range(count):
            logits = self.module(input_ids=torch.tensor([prompt + tokens])).logits[0, -1].float()
            best = int(logits.argmax())
            tokens.append(best)
            logprobs.append([(best, float(logits.log_softmax(-1)[best]))])
        return SampleResponse([SampledSequence("length", tokens, logprobs)], prompt_token_ids=prompt)
