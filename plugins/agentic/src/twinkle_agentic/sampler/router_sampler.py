"""`RouterSampler`: asks a stronger model where a sampler is not sure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from twinkle.data_format import SampledSequence, SampleResponse, SamplingParams
from twinkle.errors import ArgumentError
from twinkle.logging import get_logger
from twinkle.sampler import Sampler
from twinkle_agentic.protocol import APIError, OpenAI


class RouterSampler(Sampler):
    """Samples locally, and replaces sequences of low confidence by answers of a service with OpenAI's protocol.

    A sequence is replaced if its confidence cannot be computed, or if

    - `entropy`: the mean entropy of its tokens, in nats, over their `top_k_logprobs` most likely candidates
      (renormalized), is above `threshold`;
    - `logp`: the mean log-probability of its tokens is below `threshold`.

    An answer of the service has text only: `tokens` is empty, and there is no `new_input_feature` to train on. If the
    service does not answer, the local sequence stays, and the log says so. Encoded rows have no messages to send and
    are never replaced.

    Args:
        sampler: any sampler.
        fallback_endpoint: address of the service, without `/v1`.
        fallback_model: its name of the model.
        fallback_api_key: "" sends none.
        method: `entropy` or `logp`.
        threshold: see above.
        top_k_logprobs: candidates of each token.
        fallback_temperature: temperature of the service.
        fallback_max_tokens: tokens of its answer, at most.
        timeout: seconds for a request.

    Raises:
        ArgumentError: an argument is outside its range.
        RequirementMissing: httpx is not installed.
    """

    def __init__(
        self,
        sampler: Any,
        fallback_endpoint: str,
        fallback_model: str = "default",
        fallback_api_key: str = "",
        method: Literal["entropy", "logp"] = "entropy",
        threshold: float = 2.0,
        top_k_logprobs: int = 10,
        fallback_temperature: float = 0.7,
        fallback_max_tokens: int = 4096,
        timeout: float = 120.0,
    ) -> None:
        if method not in ("entropy", "logp"):
            raise ArgumentError(f"RouterSampler: method must be 'entropy' or 'logp', got {method!r}")
        if isinstance(top_k_logprobs, bool) or not isinstance(top_k_logprobs, int) or top_k_logprobs < 1:
            raise ArgumentError(f"RouterSampler: top_k_logprobs must be at least 1, got {top_k_logprobs!r}")
        self.sampler, self.method = sampler, method
        self.threshold, self.top_k_logprobs = float(threshold), top_k_logprobs
        base = fallback_endpoint.rstrip("/").removesuffix("/v1") + "/v1"
        self._service = OpenAI(fallback_model, fallback_api_key, base, {"timeout": timeout})
        self._params = SamplingParams(temperature=fallback_temperature, max_tokens=fallback_max_tokens)

    @property
    def template(self) -> Any:
        """The template of the sampler."""
        return self.sampler.template

    def set_template(self, template_cls: Any, **kwargs: Any) -> None:
        """Set the template of the sampler."""
        self.sampler.set_template(template_cls, **kwargs)

    def reset_prefix_cache(self) -> None:
        """Reset the prefix cache of the sampler."""
        self.sampler.reset_prefix_cache()

    def sample(
        self,
        inputs: Any,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        adapter_name: Any = "",
        **kwargs: Any,
    ) -> list[SampleResponse]:
        """Return one response for each input; see `Sampler.sample`."""
        rows = [inputs] if isinstance(inputs, Mapping) else list(inputs)
        params = sampling_params
        if not isinstance(params, SamplingParams):
            params = SamplingParams.from_dict(dict(params or {}))
        sure = replace(params, logprobs=max(params.logprobs or 0, self.top_k_logprobs))
        responses = self.sampler.sample(rows, sure, adapter_name, **kwargs)
        return [self._routed(row, response) for row, response in zip(rows, responses, strict=True)]

    def _routed(self, row: Mapping[str, Any], response: SampleResponse) -> SampleResponse:
        if "input_ids" in row:
            return response
        return replace(response, sequences=[self._kept_or_asked(row, sequence) for sequence in response.sequences])

    def _kept_or_asked(self, row: Any, sequence: SampledSequence) -> SampledSequence:
        if not self.is_unsure(sequence):
            return sequence
        try:
            answer: Any = self._service(row, self._params)
        except APIError as error:
            get_logger(__name__).warning("RouterSampler keeps a sequence of low confidence: %s", error)
            return sequence
        reason = "length" if answer.get("finish_reason") == "length" else "stop"
        return SampledSequence(reason, [], None, str(answer.get("content") or ""))  # type: ignore[arg-type]

    def is_unsure(self, sequence: SampledSequence) -> bool:
        """Return whether a sequence is to be replaced."""
        if not sequence.logprobs or not all(sequence.logprobs):
            return True
        if self.method == "entropy":
            return mean_entropy(sequence.logprobs) > self.threshold
        chosen = [dict(entry).get(token, entry[0][1]) for token, entry in zip(sequence.tokens, sequence.logprobs)]  # noqa: B905
        return sum(chosen) / len(chosen) < self.threshold


def mean_entropy(logprobs: Sequence[Sequence[tuple[int, float]]]) -> float:
    """Return the mean entropy over tokens, in nats, of the candidates (token id, log-probability), renormalized."""
    return sum(map(_entropy, logprobs)) / len(logprobs)


def _entropy(candidates: Sequence[tuple[int, float]]) -> float:
    largest = max(logp for _, logp in candidates)
    total = sum(math.exp(logp - largest) for _, logp in candidates)
    logs = [logp - largest - math.log(total) for _, logp in candidates]
    return -sum(math.exp(log) * log for log in logs)
