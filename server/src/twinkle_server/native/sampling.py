"""Endpoints for sampling: sessions, and prompts whose sequences are returned together."""

import asyncio
import contextlib
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from fastapi import APIRouter, Request, Response

from twinkle.data_format import SamplingParams
from twinkle.errors import TwinkleError
from twinkle_client import types
from twinkle_server.app_state import AppState, Caller, app_state_of, caller_of, now
from twinkle_server.chat.preparing import renderer_of
from twinkle_server.engine.errors import UserError
from twinkle_server.engine.native.rows import read_tokens
from twinkle_server.engine.native.state import Named
from twinkle_server.engine.samples import read_sample
from twinkle_server.errors import BadRequest, Gone
from twinkle_server.ids import CheckpointPath, sampler_id
from twinkle_server.native.bodies import RESULT, call_schema, frame_response, read_body
from twinkle_server.operations import Accepted, Future, Sample, Submission
from twinkle_server.requests import check_sampled, json_response
from twinkle_server.store.records import Sampler
from twinkle_server.tinker.models import check_base
from twinkle_server.tinker.sampling import check_sample

router = APIRouter()
_WAIT: Final = 20.0
"""Seconds for which the response waits; the client repeats its request until all sequences are complete."""


@router.post("/samplers", openapi_extra=call_schema(types.SamplerRequest))
async def create_sampler(request: Request) -> Response:
    """Create a sampling session of the base model or of a checkpoint."""
    caller, state = caller_of(request), app_state_of(request)
    body = await read_body(request, types.SamplerRequest)
    check_base(state, body.base_model)
    name = sampler_id(body.session_id, body.sampler_seq_id)
    base = state.service.info.name
    sampler = Sampler(name, caller.tenant, body.session_id, body.sampler_seq_id, base, now())
    if body.adapter_uri is not None:
        path = CheckpointPath.parse(body.adapter_uri)
        if path.kind == "external_weights":
            raise BadRequest(
                f"adapter_uri must be a checkpoint for training or sampling, got {path.twinkle}; external weights are "
                "files to download"
            )
        checkpoint = await state.store.checkpoints.find(caller.tenant, path, now())
        check_base(state, checkpoint.base)
        check_sampled(checkpoint, path.twinkle)
        sampler.path, sampler.folder = str(path), checkpoint.folder
    await state.store.samplers.create(sampler)
    return json_response({"sampler_id": name})


@router.delete("/samplers/{sampler_id}")
async def end_sampler(request: Request) -> Response:
    """End a sampling session; requests that are running finish. Idempotent."""
    caller, state = caller_of(request), app_state_of(request)
    name = request.path_params["sampler_id"]
    await state.store.samplers.end(caller.tenant, name, now())
    state.samplers.forget()
    return json_response({"sampler_id": name})


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt: its operation, and the encoded row that new tokens are appended to."""

    submission: Submission
    row: Any


@router.post("/samplers/{sampler_id}/sample", openapi_extra=call_schema(types.SampleRequest) | RESULT)
async def sample(request: Request) -> Response:
    """Sample sequences for prompts; 202 while some are not complete, and the same request again waits for them."""
    caller, state = caller_of(request), app_state_of(request)
    sampler = await state.sampler(caller, request.path_params["sampler_id"])
    if sampler.ended is not None:
        raise Gone(f"sampling session {sampler.id!r} has ended")
    body = await read_body(request, types.SampleRequest)
    encoded = await encoded_prompts(state, sampler, body)
    with ClientErrors():
        prompts = _prompts(state, caller, sampler, body, encoded)
    accepted = await asyncio.gather(*(state.service.submit(prompt.submission) for prompt in prompts))
    futures = await _wait(state, caller, accepted)
    if any(future.status == "pending" for future in futures):
        queue_state, reason = state.service.queue_state(sampler.id)
        done = sum(future.status != "pending" for future in futures)
        pending = {"status": "pending", "queue_state": queue_state, "done": done, "total": len(futures)}
        return json_response(pending | ({"reason": reason} if reason else {}), 202)
    for index, future in enumerate(futures):
        if future.status != "done" or future.result is None:
            error = "the request was cancelled" if future.status == "cancelled" else future.error
            where = f"input {index}: " if len(futures) > 1 else ""
            return json_response({"status": "failed", "error": f"{where}{error}", "category": future.category})
    with ClientErrors():
        results = await asyncio.to_thread(_results, state, body, prompts, futures)
    return frame_response({"value": results})


async def _wait(state: AppState, caller: Caller, accepted: list[Accepted]) -> list[Future]:
    loop = asyncio.get_running_loop()
    ends = loop.time() + min(_WAIT, state.settings.times.poll)
    return [await state.service.wait(one.request, caller.tenant, max(0.0, ends - loop.time())) for one in accepted]


async def encoded_prompts(
    state: AppState, sampler: Sampler, body: types.StreamRequest
) -> list[tuple[Sample, Any]]:  # fmt: skip
    """Return the sampling operation of each prompt of a request, and its encoded row.

    Raises:
        BadRequest: a prompt or an option is invalid.
    """
    limits, options = state.settings.limits, body.options
    if not 1 <= len(body.inputs) <= limits.datums:
        raise BadRequest(f"inputs must have between 1 and {limits.datums} prompts, got {len(body.inputs)}")
    if body.options.num_samples > limits.samples:
        raise BadRequest(f"num_samples must be at most {limits.samples}, got {body.options.num_samples}")

    if isinstance(options.seed, list) and len(options.seed) != options.num_samples:
        raise BadRequest(
            f"seed must be one number, or one for each of num_samples = {options.num_samples}, got {len(options.seed)}"
        )
    with ClientErrors():
        more = _more(options)
    if options.structured_outputs is not None:  # the engine compiles it between two steps
        await renderer_of(state).check_grammar(options.structured_outputs)

    def encode() -> list[tuple[Sample, Any]]:
        named, found = _template_of(body), []
        for index, given in enumerate(body.inputs):
            row, tokens = _encoded(state, named, index, given)
            found.append((_sample(sampler, options, more, tokens, index), row))
        return found

    with ClientErrors():
        return await asyncio.to_thread(encode)


class ClientErrors(contextlib.AbstractContextManager[None]):
    """Raises errors that the client's rows or options caused as responses."""

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        if isinstance(error, UserError | TwinkleError):
            raise BadRequest(str(error)) from error


def _prompts(
    state: AppState, caller: Caller, sampler: Sampler, body: types.SampleRequest, encoded: list[tuple[Sample, Any]]
) -> list[_Prompt]:
    content = body.model_dump_json(exclude={"inputs"}).encode()
    prompts = []
    for index, (payload, row) in enumerate(encoded):
        try:
            cost = check_sample(_without_scores(payload), state.service.info.context)
            read_sample(payload, state.service.info)
        except ValueError as error:
            raise UserError(f"input {index}: {error}") from error
        original = content + repr(payload.tokens).encode()
        number = body.seq_id + index
        submission = Submission(
            caller.tenant, sampler.id, "sample", payload.dump(), number, tokens=cost, original=original
        )
        prompts.append(_Prompt(submission, row))
    return prompts


def _template_of(body: types.StreamRequest) -> Named | None:
    return None if body.template is None else (body.template, body.template_options)


def _encoded(state: AppState, named: Named | None, index: int, given: Any) -> tuple[Any, list[int]]:
    """Return the row of a prompt, and its tokens."""
    if not isinstance(given, Mapping):
        raise UserError(f"input {index} must be a mapping with input_ids or messages, got a {type(given).__name__}")
    row = given
    if "input_ids" not in given:
        row = state.templates.get(named).encode(dict(given), add_generation_prompt=True)
    return row, read_tokens(f"input {index}: input_ids", row["input_ids"], state.service.info.vocabulary)


def _without_scores(sample: Sample) -> Sample:
    """Return a request without the scores of the prompt that Tinker allows in fewer forms."""
    return replace(sample, targets=None, prompt_logprobs_last_n=None)


def _more(options: types.SamplingOptions) -> dict[str, Any]:
    """Return the parameters that Tinker's requests do not have, where they are not the default.

    Raises:
        UserError: a value is invalid.
    """
    try:
        read = SamplingParams(
            min_p=options.min_p, repetition_penalty=options.repetition_penalty,
            presence_penalty=options.presence_penalty, frequency_penalty=options.frequency_penalty,
            logit_bias=options.logit_bias, structured_outputs=options.structured_outputs,
            sampled_logprobs=options.sampled_logprobs, raw_logprobs=options.raw_logprobs,
        )  # fmt: skip
    except ValueError as error:
        raise UserError(str(error)) from error
    default = SamplingParams()
    changed = {name: value for name, value in read.to_dict().items() if value != getattr(default, name)}
    if read.logit_bias is not None:  # JSON has texts as keys
        changed["logit_bias"] = {str(token): value for token, value in read.logit_bias.items()}
    if options.prompt_logprobs or options.prompt_targets is not None or options.prompt_draws:
        changed["prompt_temperature"] = (
            options.temperature if options.prompt_temperature is None else options.prompt_temperature
        )
    return changed


def _sample(
    sampler: Sampler, options: types.SamplingOptions, more: dict[str, Any], tokens: list[int], index: int
) -> Sample:
    alternatives = 0 if options.logprobs is None or options.logprobs < 2 else options.logprobs
    shift, seed = index * options.num_samples, options.seed
    if isinstance(seed, list):
        more = {**more, "seed": [(one + shift) % 2**63 for one in seed]}
    targets = options.prompt_targets
    return Sample(
        tokens,
        options.num_samples,
        source=None if sampler.inflight else sampler.folder,
        inflight=sampler.inflight,
        max_tokens=None if options.max_tokens is None else max(1, options.max_tokens),
        seed=seed + shift if isinstance(seed, int) else 0 if seed else secrets.randbits(48),
        stop=[options.stop] if isinstance(options.stop, str) else options.stop,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        prompt_logprobs=bool(options.prompt_logprobs),
        topk_prompt_logprobs=options.prompt_logprobs or 0,
        prompt_logprobs_last_n=options.prompt_logprobs_last,
        topk_sample_logprobs=max(alternatives, options.topk_logprobs),
        targets=None if targets is None else _table(targets),
        alternatives=options.prompt_draws,
        more=more or None,
    )


def _table(rows: list[list[int]]) -> dict[str, Any]:
    """Return tokens `[N, K]` in the form of a request.

    Raises:
        UserError: the rows have different lengths.
    """
    width = len(rows[0]) if rows else 0
    if any(len(row) != width for row in rows):
        raise UserError("the rows of prompt_targets must have the same length; fill them with -1")
    return {"data": [token for row in rows for token in row], "shape": [len(rows), width]}


def _results(
    state: AppState, body: types.SampleRequest, prompts: list[_Prompt], futures: list[Future]
) -> list[dict[str, Any]]:
    return [_result(state, body, prompt, future) for prompt, future in zip(prompts, futures, strict=True)]


def _result(state: AppState, body: types.SampleRequest, prompt: _Prompt, future: Future) -> dict[str, Any]:
    from twinkle_server.wire.codec import read_sample_response

    texts, scores = read_sample_response(future.result or b"")
    tokens = [int(token) for token in prompt.row["input_ids"]]
    result: dict[str, Any] = {"prompt_token_ids": tokens, "sequences": [], "cached_tokens": scores.hits}
    if scores.logprobs is not None:
        result["prompt_logprobs"] = [None if math.isnan(value) else value for value in scores.logprobs.tolist()]
    if scores.topk is not None:
        result["topk_prompt_logprobs"] = _pairs(scores.topk)
    if isinstance(scores.targets, np.ndarray):
        result["prompt_target_logprobs"] = [
            [None if math.isnan(value) else value for value in row] for row in scores.targets.tolist()
        ]
    if scores.alternatives is not None:
        drawn = (array.tolist() for array in scores.alternatives)
        result["prompt_draws"] = [list(zip(*row, strict=True)) for row in zip(*drawn, strict=True)]
    if body.options.max_tokens != 0:
        result["sequences"] = [_sequence(state, body, prompt.row, text) for text in texts]
    return result


def _sequence(state: AppState, body: types.SampleRequest, row: Any, text: Any) -> dict[str, Any]:
    tokens, options = text.tokens.tolist(), body.options
    sequence: dict[str, Any] = {"stop_reason": text.stop, "tokens": tokens}
    if text.sampled is not None:
        sequence["sampled_logprobs"] = text.sampled.tolist()
    if text.raw is not None:
        sequence["raw_logprobs"] = text.raw.tolist()
    if options.topk_logprobs:
        sequence["topk_logprobs"] = [(pairs or [])[: options.topk_logprobs] for pairs in _pairs(text.topk)]
    if options.logprobs:
        drawn = [[(token, logprob)] for token, logprob in zip(tokens, text.logprobs.tolist(), strict=True)]
        if text.topk is not None:
            drawn = [
                (own + [pair for pair in more or () if pair[0] != own[0][0]])[: options.logprobs]
                for own, more in zip(drawn, _pairs(text.topk), strict=True)
            ]
        sequence["logprobs"] = drawn
    if body.template is None and not state.service.info.tokenizer:
        return sequence
    template = state.templates.get(_template_of(body))
    sequence["decoded"] = _text_of(template, options, tokens, text.stop)
    sequence["new_input_feature"] = dict(template.concat_input_feature(dict(row), tokens))
    return sequence


def stops_of(options: types.SamplingOptions) -> list[str]:
    """Return the texts that end a sequence."""
    stop = [options.stop] if isinstance(options.stop, str) else options.stop or []
    return [item for item in stop if isinstance(item, str) and item]


def ends_with_stop(options: types.SamplingOptions, reason: str | None) -> bool:
    """Return whether the last token of a sequence is a stop token, unless a text has ended it."""
    return reason == "stop" and options.stop != []


def _text_of(template: Any, options: types.SamplingOptions, tokens: list[int], reason: str) -> str:
    """Return the text of a sequence, without special tokens, stop token, and everything from a stop text on."""
    if stops := stops_of(options):
        text = str(template.decode(tokens, skip_special_tokens=False))
        if starts := [start for string in stops if (start := text.find(string)) >= 0]:
            text = text[: min(starts)]
            for special in template.tokenizer.all_special_tokens:
                text = text.replace(special, "")
            return text
    kept = tokens[:-1] if ends_with_stop(options, reason) else tokens
    return str(template.decode(kept, skip_special_tokens=True))


def _pairs(topk: Any) -> list[list[tuple[int, float]] | None]:
    """Return alternatives as pairs of token and log-probability, for each position; None where there are none."""
    from twinkle_server.wire.codec import EMPTY_LOGPROB

    pairs: list[list[tuple[int, float]] | None] = []
    for ids, logprobs in zip(topk.tokens.tolist(), topk.logprobs.tolist(), strict=True):
        valid = [(token, logprob) for token, logprob in zip(ids, logprobs, strict=True) if logprob != EMPTY_LOGPROB]
        pairs.append(valid or None)
    return pairs
