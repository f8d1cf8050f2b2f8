"""Sampling: requests and results."""

from typing import Annotated, Any, Literal

from pydantic import Field

from twinkle_client.types.base import Name, Number, Plain, Request, Response, Seed, Text


class SamplerRequest(Request):
    """A new sampling session: of the base model, or of a checkpoint.

    Attributes:
        session_id: of the client.
        sampler_seq_id: number of the sampling session in its session, which identifies a retry.
        base_model: name of the served model; None is the one that is served.
        adapter_uri: path of a checkpoint.
    """

    session_id: Name
    sampler_seq_id: Number
    base_model: Text | None = None
    adapter_uri: Text | None = None


class SamplingOptions(Request):
    """The fields of `twinkle.data_format.SamplingParams` that a service samples with.

    Attributes:
        max_tokens: None is limited only by the context; 0 scores the prompt alone.
        temperature: 0 is greedy.
        top_k: -1 disables it.
        top_p: 1 disables it.
        seed: None draws one; sequence i uses seed + i.
        stop: texts or token ids.
        num_samples: number of sequences of each prompt.
        logprobs: number of log-probabilities of each token: 1 is that of the token itself.
        prompt_logprobs: number of log-probabilities of each prompt token.
    """

    max_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=2**31)] = -1
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    seed: Seed | None = None
    stop: Text | list[Text] | list[int] | None = None
    num_samples: Annotated[int, Field(ge=1, le=4096)] = 1
    logprobs: Annotated[int, Field(ge=0, le=1024)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=1024)] | None = None


class StreamRequest(Request):
    """Prompts to sample, whose tokens are sent while they are sampled.

    Attributes:
        inputs: each an encoded row (`input_ids`) or a conversation (`messages`).
        options: sampling parameters.
        template: component that encodes conversations and decodes sequences; None is `Template`.
        template_options: of its constructor.
    """

    inputs: list[Any]
    options: SamplingOptions = SamplingOptions()
    template: Name | None = None
    template_options: Plain = Field(default_factory=dict)


class SampleRequest(StreamRequest):
    """Prompts to sample.

    Attributes:
        inputs: each an encoded row (`input_ids`) or a conversation (`messages`).
        options: sampling parameters.
        template: component that encodes conversations and decodes sequences; None is `Template`.
        template_options: of its constructor.
        seq_id: number of the first prompt in the sampling session; identifies a retry.
    """

    seq_id: Number


class SampleDelta(Response):
    """What one sequence of a stream has gained.

    Attributes:
        input: index of the prompt.
        sample: index of the sequence of this prompt.
        tokens: new tokens.
        text: their text, without special tokens; a character that is not complete comes with its last token.
        logprobs: for each new token the pairs of token id and log-probability, if requested.
        stop_reason: why the sequence ended; None while it grows.
    """

    input: int
    sample: int
    tokens: list[int]
    text: str = ""
    logprobs: list[list[tuple[int, float]]] | None = None
    stop_reason: Literal["stop", "length", "abort"] | str | None = None


class SampledSequenceModel(Response):
    """One sampled sequence; `logprobs` has for each token the pairs of token id and log-probability."""

    stop_reason: Literal["stop", "length", "abort"] | str
    tokens: list[int]
    logprobs: list[list[tuple[int, float]]] | None = None
    decoded: str | None = None
    new_input_feature: dict[str, Any] | None = None


class SampleResponseModel(Response):
    """The sequences of one prompt; scores begin with None, as the first token has no log-probability."""

    sequences: list[SampledSequenceModel]
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None
