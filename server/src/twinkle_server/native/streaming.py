"""Streams of sampled tokens: server-sent events, each a `SampleDelta` as JSON.

A stream is not written to the log. It ends with its client, or with the engine; the client then starts it anew.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from fastapi import APIRouter, Request

from twinkle_client import types
from twinkle_server.app_state import AppState, Caller, app_state_of, caller_of
from twinkle_server.chat.decoding import TextDecoder
from twinkle_server.chat.exchange import Exchange, Usage
from twinkle_server.chat.openai import respond
from twinkle_server.engine.samples import read_sample
from twinkle_server.errors import BadRequest, Gone, ServiceError
from twinkle_server.native.bodies import call_schema, read_body
from twinkle_server.native.sampling import ClientErrors, encoded_prompts, ends_with_stop, stops_of
from twinkle_server.openapi import EVENTS, returns
from twinkle_server.operations import Generate
from twinkle_server.runtime.generations import Part

router = APIRouter()


@router.post(
    "/samplers/{sampler_id}/stream", openapi_extra=call_schema(types.StreamRequest) | returns(EVENTS, json=False)
)
async def stream(request: Request) -> Any:
    """Sample sequences for prompts, and send tokens as they are sampled; closing the connection cancels the rest."""
    caller, state = caller_of(request), app_state_of(request)
    sampler = await state.sampler(caller, request.path_params["sampler_id"])
    if sampler.ended is not None:
        raise Gone(f"sampling session {sampler.id!r} has ended")
    body = await read_body(request, types.StreamRequest)
    _check_options(body.options)
    prompts = await encoded_prompts(state, sampler, body)
    with ClientErrors():
        params = [read_sample(sample, state.service.info)[0] for sample, _ in prompts]
    generates = [
        Generate(sample.tokens, fields, sampler.folder) for (sample, _), fields in zip(prompts, params, strict=True)
    ]
    exchange = await _start(state, caller, body, generates)
    events = _Events(body.options.logprobs or 0, body.options.topk_logprobs)
    return await respond(request, exchange, events, stream=True)


def _check_options(options: types.SamplingOptions) -> None:
    """Refuse what only a complete response has.

    Raises:
        BadRequest: an option asks for it.
    """
    scored = options.prompt_logprobs or options.prompt_targets is not None or options.prompt_draws
    if scored or options.max_tokens == 0:
        raise BadRequest(
            "a stream has no scores of the prompt; use sample for prompt_logprobs, prompt_targets, prompt_draws and "
            "max_tokens=0"
        )
    if options.sampled_logprobs or options.raw_logprobs:
        raise BadRequest("a stream has the log-probabilities of logprobs only; use sample for the others")


async def _start(
    state: AppState, caller: Caller, body: types.StreamRequest, generates: Sequence[Generate]
) -> Exchange:  # fmt: skip
    tokenizer = None
    if state.renderer is not None and state.service.info.tokenizer:
        tokenizer = (await state.renderer.text()).tokenizer
    count = body.options.num_samples
    generations: list[Any] = []
    try:
        for generate in generates:
            generations.append(await state.service.generate(caller.tenant, generate))
    except ServiceError:
        for generation in generations:
            generation.cancel()
        raise
    stops = stops_of(body.options)
    choices: list[Any] = [
        [
            _Sequence(place, None if tokenizer is None else TextDecoder(tokenizer, stops), body.options)
            for _ in range(count)
        ]
        for place in range(len(generates))
    ]
    return Exchange(generations, choices)


@dataclass(slots=True)
class _Gain:
    """A part of a sequence, with its text."""

    input: int
    part: Part
    text: str
    empty: bool = field(init=False)

    def __post_init__(self) -> None:
        self.empty = not self.part.tokens and self.part.stop_reason is None


@dataclass(frozen=True, slots=True)
class _Sequence:
    """One sequence: its prompt, and what decodes it; None without a tokenizer."""

    input: int
    decoder: TextDecoder | None
    options: types.SamplingOptions

    def take(self, part: Part) -> _Gain:
        """Return what a part adds."""
        if self.decoder is None:
            text = ""
        elif part.stop_reason is None:
            text = self.decoder.add(part.tokens)
        else:
            text = self.decoder.finish(part.tokens, ends_with_stop(self.options, part.stop_reason))
        return _Gain(self.input, part, text)


@dataclass(frozen=True, slots=True)
class _Events:
    """Writes the events of a stream.

    Attributes:
        logprobs: number of log-probabilities of each token, its own first.
        topk: number of most probable tokens at each position.
    """

    logprobs: int
    topk: int = 0

    def start(self) -> bytes:
        """Return nothing: each delta has all that a client needs."""
        return b""

    def deltas(self, deltas: Sequence[Any]) -> bytes:
        """Return the events of new parts."""
        return b"".join(_event(self._fields(delta)) for delta in deltas)

    def _fields(self, delta: _Gain) -> dict[str, Any]:
        part = delta.part
        fields: dict[str, Any] = {
            "input": delta.input, "sample": part.sample, "tokens": part.tokens, "text": delta.text,
            "stop_reason": part.stop_reason,
        }  # fmt: skip
        if self.logprobs:
            tops = part.topk or [[]] * len(part.tokens)
            fields["logprobs"] = [
                [(token, logprob), *(pair for pair in top if pair[0] != token)][: self.logprobs]
                for token, logprob, top in zip(part.tokens, part.logprobs, tops, strict=True)
            ]
        if self.topk:
            fields["topk_logprobs"] = [list(top)[: self.topk] for top in part.topk or [[]] * len(part.tokens)]
        return fields

    def end(self, usage: Usage) -> bytes:
        """Return the last event."""
        return _event({"end": {"prompt_tokens": usage.prompt, "completion_tokens": usage.completion}})

    def error(self, error: ServiceError) -> bytes:
        """Return the event of an error."""
        return _event({"error": error.message, "status": error.status})


def _event(fields: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(fields) + b"\n\n"
