"""Sampling parameters and results of sampling."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeAlias

from twinkle.data_format.features import InputFeature
from twinkle.errors import ArgumentError, Unsupported

StopReason: TypeAlias = Literal["length", "stop", "abort", "error"]
_OURS_ALONE = (
    "topk_logprobs", "prompt_logprobs_last", "prompt_temperature", "prompt_targets", "prompt_draws", "sampled_logprobs",
    "raw_logprobs",
)  # fmt: skip
STRUCTURES = ("json", "json_object", "regex", "choice", "grammar")
"""Keys of `SamplingParams.structured_outputs`, as in vLLM."""
JSON_WHITESPACE = r"(\n[ \t]{0,32}| )?"
"""Pattern of the white space between the parts of JSON in structured outputs: a space, or a line break and indentation.
Without a limit, a model may write white space until `max_tokens`."""


@dataclass
class SamplingParams:
    """Parameters of sampling.

    Attributes:
        max_tokens: maximum number of new tokens; 0 scores the prompt only; None leaves the limit to the sampler.
        seed: the same seed gives the same tokens, independent of the rest of the batch. A list has one seed for each
            sample; such a sample equals a separate request with that seed.
        stop: a string, several strings, or token ids that end a sequence, in addition to the model's end tokens (the
            match is not part of `decoded`). With `[]` only `max_tokens` ends a sequence.
        temperature: 0 is greedy.
        top_k: sample from the k most probable tokens; -1 means all.
        top_p: sample from the smallest set of most probable tokens whose probability reaches p.
        min_p: sample only from tokens with at least this share of the probability of the most probable one
            (arXiv:2407.01082); 0 means all.
        repetition_penalty: values > 1 make tokens that occurred less likely (arXiv:1909.05858, section 4.1).
        presence_penalty: subtracted from the logits of all tokens that the sequence has sampled so far.
        frequency_penalty: subtracted from a token's logit once for each time that the sequence has sampled it.
        logit_bias: numbers to add to logits before the penalties, by token id.
        structured_outputs: what the text must match, as a mapping with one key: `json` (a JSON schema, as a dict or as
            text), `json_object` (True: any JSON object), `regex`, `choice` (a list of texts) or `grammar` (in the Lark
            syntax of llguidance). Tokens that do not fit are not sampled, and the sequence ends only where the text is
            complete, unless `max_tokens` or `stop` ends it before.
        logprobs: number of log-probabilities per token; 1 returns that of the sampled token.
        prompt_logprobs: the same for the tokens of the prompt.
        num_samples: number of sequences per prompt.
        topk_logprobs: number of most probable tokens to return at the position of each new token.
        prompt_logprobs_last: score only this many tokens at the end of the prompt, so that the rest can come from the
            prefix cache; None scores all. Needs `prompt_logprobs`.
        prompt_temperature: temperature of the prompt's scores; None means `temperature`.
        prompt_targets: token ids `[N, K]` to score in the prompt: row i at the position of token i + 1; -1 scores
            nothing. N is at most the length of the prompt (its last row is the position of the first new token).
        prompt_draws: number of tokens to sample, with replacement, at the position of each prompt token except the
            first, at `temperature`, without top-k and top-p.
        sampled_logprobs: also return the log-probability of each sampled token in the distribution that it was sampled
            from, after temperature, repetition penalty, top-k and top-p.
        raw_logprobs: also return its log-probability at temperature 1 without penalty, top-k and top-p.

    Raises:
        ValueError: a value is outside its range.
    """

    max_tokens: int | None = None
    seed: int | Sequence[int] | None = None
    stop: str | Sequence[str] | Sequence[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    structured_outputs: Mapping[str, Any] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    num_samples: int = 1
    topk_logprobs: int = 0
    prompt_logprobs_last: int | None = None
    prompt_temperature: float | None = None
    prompt_targets: Sequence[Sequence[int]] | None = None
    prompt_draws: int = 0
    sampled_logprobs: bool = False
    raw_logprobs: bool = False

    def __post_init__(self) -> None:
        self.logit_bias = _read_bias(self.logit_bias)
        checks = {
            "temperature": (self.temperature >= 0, "at least 0 (0 is greedy)"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "top_k": (self.top_k == -1 or self.top_k >= 1, "-1 (all) or at least 1"),
            "logprobs": (self.logprobs is None or self.logprobs >= 0, "None or at least 0"),
            "prompt_logprobs": (self.prompt_logprobs is None or self.prompt_logprobs >= 0, "None or at least 0"),
            "num_samples": (self.num_samples >= 1, "at least 1"),
            "max_tokens": (self.max_tokens is None or self.max_tokens >= 0, "None or at least 0"),
            "min_p": (0 <= self.min_p <= 1, "from 0 to 1"),
            "repetition_penalty": (self.repetition_penalty > 0, "above 0"),
            "presence_penalty": (math.isfinite(self.presence_penalty), "finite"),
            "frequency_penalty": (math.isfinite(self.frequency_penalty), "finite"),
            "structured_outputs": (
                self.structured_outputs is None or _is_structure(self.structured_outputs),
                f"None, or a mapping with one of the keys {', '.join(STRUCTURES)} and a value of its type",
            ),
            "topk_logprobs": (self.topk_logprobs >= 0, "at least 0"),
            "prompt_logprobs_last": (
                self.prompt_logprobs_last is None or (self.prompt_logprobs_last >= 0 and bool(self.prompt_logprobs)),
                "None, or at least 0 together with prompt_logprobs",
            ),
            "prompt_temperature": (
                self.prompt_temperature is None or self.prompt_temperature >= 0,
                "None or at least 0 (0 counts as 1)",
            ),
            "prompt_draws": (self.prompt_draws >= 0, "at least 0"),
            "sampled_logprobs": (isinstance(self.sampled_logprobs, bool), "True or False"),
            "raw_logprobs": (isinstance(self.raw_logprobs, bool), "True or False"),
            "seed": (
                self.seed is None or isinstance(self.seed, int) or len(self.seed) == self.num_samples,
                f"one number, or one for each of num_samples = {self.num_samples}",
            ),
        }
        for name, (good, allowed) in checks.items():
            if not good:
                raise ValueError(f"SamplingParams.{name} = {getattr(self, name)!r}; it must be {allowed}")

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> "SamplingParams":
        """Build from a mapping, which is not changed; `max_new_tokens` is an alias of `max_tokens`.

        Raises:
            ArgumentError: a key is unknown; the message names the nearest one.
        """
        values = dict(d)
        if "max_new_tokens" in values:
            alias = values.pop("max_new_tokens")
            if values.setdefault("max_tokens", alias) != alias:
                raise ArgumentError("SamplingParams: max_tokens and max_new_tokens are given and differ; give one")
        known = [f.name for f in fields(cls)]
        if unknown := sorted(set(values) - set(known)):
            from twinkle_registry import nearest

            hint = nearest(unknown[0], known)
            did = f"; did you mean {hint[0]!r}?" if hint else ""
            raise ArgumentError(f"SamplingParams has no {unknown[0]!r}{did} Known: {', '.join(known)}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a plain dict."""
        return asdict(self)

    @property
    def endless(self) -> bool:
        """Whether only `max_tokens` ends a sequence: `stop` is an empty list."""
        return self.stop is not None and not isinstance(self.stop, str) and len(self.stop) == 0

    def stop_strings(self) -> list[str]:
        """Return the strings among `stop`."""
        if self.stop is None:
            return []
        if isinstance(self.stop, str):
            return [self.stop]
        return [item for item in self.stop if isinstance(item, str)]

    def stop_token_ids(self) -> list[int]:
        """Return the token ids among `stop`."""
        if self.stop is None or isinstance(self.stop, str):
            return []
        return [int(item) for item in self.stop if not isinstance(item, str)]

    def to_vllm(self, **kwargs: Any) -> Any:
        """Return `vllm.SamplingParams`; keyword arguments are passed on and override the fields.

        Raises:
            Unsupported: vLLM has no equivalent of a field that is set.
        """
        defaults = {f.name: f.default for f in fields(self)}
        beyond = [name for name in _OURS_ALONE if getattr(self, name) != defaults[name]]
        if beyond or not isinstance(self.seed, int | None):
            raise Unsupported(f"vLLM has nothing for SamplingParams.{[*beyond, 'seed'][0]}; leave it out")
        from vllm import SamplingParams as VLLMSamplingParams  # type: ignore[import-not-found,unused-ignore]

        values: dict[str, Any] = {
            "n": self.num_samples,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": self.logit_bias,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "repetition_penalty": self.repetition_penalty,
            "logprobs": self.logprobs,
            "prompt_logprobs": self.prompt_logprobs,
            "stop": self.stop_strings() or None,
            "stop_token_ids": self.stop_token_ids() or None,
            "ignore_eos": self.endless,
        }
        if self.structured_outputs is not None:
            from vllm.sampling_params import StructuredOutputsParams  # type: ignore[import-not-found,unused-ignore]

            values["structured_outputs"] = StructuredOutputsParams(**self.structured_outputs)
        if "num_samples" in kwargs:
            values["n"] = kwargs.pop("num_samples")
        return VLLMSamplingParams(**(values | kwargs))

    def to_transformers(self, tokenizer: Any = None) -> dict[str, Any]:
        """Return keyword arguments of `transformers.GenerationMixin.generate` (the seed is not part of them).

        Args:
            tokenizer: required if `stop` has strings, because `generate` matches them on decoded text.

        Raises:
            Unsupported: `generate` has no equivalent of a field that is set.
        """
        if self.presence_penalty or self.frequency_penalty or self.structured_outputs is not None:
            raise Unsupported(
                "transformers has nothing for SamplingParams.presence_penalty, frequency_penalty and "
                "structured_outputs; leave them out, or use a sampler of Twinkle"
            )
        values: dict[str, Any] = {
            "max_new_tokens": 2048 if self.max_tokens is None else self.max_tokens,
            "do_sample": self.temperature > 0,
            "repetition_penalty": self.repetition_penalty,
            "num_return_sequences": self.num_samples,
        }
        if self.temperature > 0:
            values |= {"temperature": self.temperature, "top_p": self.top_p, "top_k": max(self.top_k, 0)}
            if self.min_p:
                values["min_p"] = self.min_p
        if self.logit_bias:
            values["sequence_bias"] = [[[token], bias] for token, bias in self.logit_bias.items()]
        if self.endless:
            values["eos_token_id"] = None
        if strings := self.stop_strings():
            if tokenizer is None:
                raise ValueError("SamplingParams.to_transformers: stop strings need tokenizer=")
            values |= {"stop_strings": strings, "tokenizer": tokenizer}
        return values


def _read_bias(bias: Mapping[Any, Any] | None) -> dict[int, float] | None:
    """Return token ids and numbers; JSON has made texts of the ids."""
    try:
        read = None if bias is None else {int(token): float(value) for token, value in bias.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"SamplingParams.logit_bias must be a mapping of token ids to numbers: {error}") from error
    for token, value in (read or {}).items():
        if token < 0 or not math.isfinite(value):
            raise ValueError(
                f"SamplingParams.logit_bias must have token ids of at least 0 and finite numbers, got {token}: {value}"
            )
    return read


def _is_structure(value: Any) -> bool:
    if not isinstance(value, Mapping) or len(value) != 1:
        return False
    ((key, content),) = value.items()
    if key == "choice":
        texts = isinstance(content, Sequence) and not isinstance(content, str)
        return texts and bool(content) and all(isinstance(text, str) and text for text in content)
    kinds: dict[str, Any] = {"json": (str, Mapping, bool), "json_object": bool, "regex": str, "grammar": str}
    return (
        key in kinds and isinstance(content, kinds[key]) and content != "" and (key == "json" or content is not False)
    )


@dataclass
class SampledSequence:
    """One generated sequence.

    Attributes:
        stop_reason: why the sequence ended.
        tokens: the new token ids, the stop token included.
        logprobs: for each new token a list of (token id, log-probability), the sampled token first, at the temperature
            of sampling, before repetition penalty, top-k and top-p: the same as a training forward computes.
        decoded: the new text, without special tokens and without the stop string.
        new_input_feature: prompt and completion as one row, ready for `model.forward_backward`.
        routed_experts: expert choices of mixture models, where recorded.
        topk_logprobs: for each new token the most probable tokens at its position, as (token id, log-probability), in
            descending order; None if not requested.
        sampled_logprobs: log-probability of each new token in the distribution that it was sampled from; 0 if it was
            the only choice. None if not requested.
        raw_logprobs: log-probability of each new token at temperature 1, without any filter; None if not requested.
    """

    stop_reason: StopReason
    tokens: list[int]
    logprobs: list[list[tuple[int, float]]] | None = None
    decoded: str | None = None
    new_input_feature: InputFeature | None = None
    routed_experts: Any | None = None
    topk_logprobs: list[list[tuple[int, float]]] | None = None
    sampled_logprobs: list[float] | None = None
    raw_logprobs: list[float] | None = None


@dataclass
class SampleResponse:
    """All sequences of one prompt.

    Attributes:
        sequences: `num_samples` of them.
        prompt_token_ids: token ids of the prompt.
        prompt_logprobs: log-probability of each prompt token given those before it; None for the first token, and for
            tokens that were not scored.
        topk_prompt_logprobs: the k most probable tokens at each prompt position, as (token id, log-probability).
        prompt_target_logprobs: log-probabilities of `prompt_targets`; None for targets of -1.
        prompt_draws: tokens sampled at the position of each prompt token except the first, as (token id,
            log-probability).
        cached_tokens: number of prompt tokens that came from the prefix cache.
    """

    sequences: Sequence[SampledSequence]
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None
    prompt_target_logprobs: list[list[float | None]] | None = None
    prompt_draws: list[list[tuple[int, float]]] | None = None
    cached_tokens: int = 0
