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


Token = Annotated[int, Field(ge=0, le=2**31 - 1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=1024)]


class SamplingOptions(Request):
    """The fields of `twinkle.data_format.SamplingParams`, with the meaning that they have there.

    Attributes:
        max_tokens: None is limited only by the context; 0 scores the prompt alone.
        temperature: 0 is greedy.
        top_k: -1 disables it.
        top_p: 1 disables it.
        min_p: smallest probability, as a share of that of the most probable token; 0 disables it.
        repetition_penalty: of tokens that occurred; 1 disables it.
        presence_penalty: of tokens that the sequence has; 0 disables it.
        frequency_penalty: for each time that the sequence has a token; 0 disables it.
        logit_bias: added to the logits, by token id.
        structured_outputs: form of the text: one of `json`, `json_object`, `regex`, `choice` and `grammar`.
        seed: None draws one; sequence i of prompt p uses seed + p * num_samples + i. A list has the seeds of the
            sequences of the first prompt.
        stop: texts or token ids.
        num_samples: number of sequences of each prompt.
        logprobs: number of log-probabilities of each token: 1 is that of the token itself.
        topk_logprobs: number of most probable tokens to return at the position of each new token.
        sampled_logprobs: whether to return log-probabilities in the distribution that was sampled from.
        raw_logprobs: whether to return log-probabilities at temperature 1, without filters.
        prompt_logprobs: number of log-probabilities of each prompt token.
        prompt_logprobs_last: number of tokens at the end of the prompt to score; None scores all.
        prompt_temperature: of the prompt's scores; None is `temperature`.
        prompt_targets: tokens to score in the prompt: row i at the position of token i + 1; -1 scores nothing.
        prompt_draws: number of tokens to draw at the position of each prompt token except the first.
    """

    max_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=2**31)] = -1
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 1.0
    presence_penalty: Finite = 0.0
    frequency_penalty: Finite = 0.0
    logit_bias: Annotated[dict[Token, Finite], Field(max_length=2**16)] | None = None
    structured_outputs: Plain | None = None
    seed: Seed | Annotated[list[Seed], Field(max_length=4096)] | None = None
    stop: Text | list[Text] | list[int] | None = None
    num_samples: Annotated[int, Field(ge=1, le=4096)] = 1
    logprobs: Count | None = None
    topk_logprobs: Count = 0
    sampled_logprobs: bool = False
    raw_logprobs: bool = False
    prompt_logprobs: Count | None = None
    prompt_logprobs_last: Annotated[int, Field(ge=0, le=2**31)] | None = None
    prompt_temperature: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] | None = None
    prompt_targets: list[list[Annotated[int, Field(ge=-1, le=2**31 - 1)]]] | None = None
    prompt_draws: Count = 0


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
        topk_logprobs: for each new token those of the most probable tokens, if requested.
        stop_reason: why the sequence ended; None while it grows.
    """

    input: int
    sample: int
    tokens: list[int]
    text: str = ""
    logprobs: list[list[tuple[int, float]]] | None = None
    topk_logprobs: list[list[tuple[int, float]]] | None = None
    stop_reason: Literal["stop", "length", "abort"] | str | None = None


class SampledSequenceModel(Response):
    """One sampled sequence; the fields are those of `twinkle.data_format.SampledSequence`."""

    stop_reason: Literal["stop", "length", "abort"] | str
    tokens: list[int]
    logprobs: list[list[tuple[int, float]]] | None = None
    topk_logprobs: list[list[tuple[int, float]]] | None = None
    sampled_logprobs: list[float] | None = None
    raw_logprobs: list[float] | None = None
    decoded: str | None = None
    new_input_feature: dict[str, Any] | None = None


class SampleResponseModel(Response):
    """The sequences of one prompt; the fields are those of `twinkle.data_format.SampleResponse`."""

    sequences: list[SampledSequenceModel]
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None
    prompt_target_logprobs: list[list[float | None]] | None = None
    prompt_draws: list[list[tuple[int, float]]] | None = None
    cached_tokens: int = 0
