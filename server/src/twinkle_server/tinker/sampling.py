"""Endpoints for sampling: sessions, and requests that are validated and become operations."""

import asyncio
import math
import secrets
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field, StrictInt, StrictStr

from twinkle_server.app_state import Caller, app_state_of, caller_of, now
from twinkle_server.errors import BadRequest, Gone
from twinkle_server.ids import CheckpointPath, sampler_id
from twinkle_server.operations import Sample, Submission
from twinkle_server.requests import (
    LARGE,
    Body,
    Id,
    Number,
    Seed,
    Text,
    accepted_response,
    body_schema,
    check_sampled,
    json_response,
    read,
    without_none,
)
from twinkle_server.store import recorded
from twinkle_server.store.records import Sampler
from twinkle_server.tinker.models import check_base

_TARGETS = ("data", "shape", "sparse_crow_indices", "sparse_col_indices")
_MOST_CELLS = 2**24


def prompt_tokens(prompt: Mapping[str, Any]) -> list[int]:
    """Return the tokens of a prompt.

    Raises:
        ValueError: it is invalid, or contains something other than text.
    """
    from twinkle_server.wire import tinker_pb2 as pb
    from twinkle_server.wire.codec import datum_tokens
    from twinkle_server.wire.json_bodies import write_chunks

    datum = pb.Datum()
    try:
        write_chunks(prompt, datum)
        tokens: list[int] = datum_tokens(datum).tolist()
    except ValueError as error:
        raise ValueError(f"prompt: {error}") from error
    if not tokens:
        raise ValueError("prompt must have at least one token")
    return tokens


def check_sample(sample: Sample, context: int) -> int:
    """Validate a request, and return its cost in tokens.

    Args:
        sample: the request, including the prompt.
        context: maximum length of prompt and sequence together; 0 if unknown, in which case the engine checks it.

    Raises:
        ValueError: an option is invalid; the message names it.
    """
    _check_params(sample)
    prompt = len(sample.tokens)
    longest = sample.max_tokens if sample.max_tokens is not None else max(context, prompt + 1) - prompt
    if context and prompt + longest > context:
        raise ValueError(
            f"the prompt ({prompt} tokens) and max_tokens ({sample.max_tokens}) exceed the model's context of {context}"
        )
    _check_size(sample, longest)
    _check_scores(sample)
    return prompt + sample.count * longest


def _check_size(sample: Sample, longest: int) -> None:
    wide = sample.topk_prompt_logprobs + sample.alternatives
    cells = wide * len(sample.tokens) + sample.topk_sample_logprobs * sample.count * longest
    if cells > _MOST_CELLS:
        raise ValueError(
            f"topk_prompt_logprobs, topk_sample_logprobs and prompt_alt_tokens_k must request at most {_MOST_CELLS} "
            f"numbers in total, got {cells}"
        )


def _check_params(sample: Sample) -> None:
    if sample.max_tokens is not None and sample.max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {sample.max_tokens}")
    if not math.isfinite(sample.temperature) or sample.temperature < 0:
        raise ValueError(f"temperature must be at least 0 (0 is greedy), got {sample.temperature}")
    if sample.top_k < 1 and sample.top_k != -1:
        raise ValueError(f"top_k must be at least 1, or -1 for all, got {sample.top_k}")
    if not 0 < sample.top_p <= 1:
        raise ValueError(f"top_p must be greater than 0 and at most 1, got {sample.top_p}")
    if sample.stop is not None and "" in sample.stop:
        raise ValueError("stop must not contain an empty string")


def _check_scores(sample: Sample) -> None:
    if sample.prompt_logprobs_last_n is not None:
        if not sample.prompt_logprobs:
            raise ValueError("prompt_logprobs_last_n requires prompt_logprobs")
        if not 1 <= sample.prompt_logprobs_last_n <= len(sample.tokens) - 1:
            raise ValueError(
                f"prompt_logprobs_last_n must be between 1 and {len(sample.tokens) - 1} for this prompt, "
                f"got {sample.prompt_logprobs_last_n}"
            )
    if sample.targets is None:
        return
    from twinkle_server.wire.codec import read_sparse, read_tensor
    from twinkle_server.wire.json_bodies import tensor_message

    sample.targets = {name: sample.targets[name] for name in _TARGETS if sample.targets.get(name) is not None}
    tensor = tensor_message({**sample.targets, "dtype": "int64"}, "target_prompt_logprobs")
    if tensor.WhichOneof("encoding") == "sparse_csr":
        read_sparse(tensor)
    else:
        read_tensor(tensor, "target_prompt_logprobs")
    rows = tensor.shape[0] if len(tensor.shape) else 0
    if len(tensor.shape) != 2 or rows != len(sample.tokens) - 1:
        raise ValueError(
            f"target_prompt_logprobs must have the shape [{len(sample.tokens) - 1}, K], one row per prompt token after "
            f"the first, got {tuple(tensor.shape)}"
        )


router = APIRouter()
Whole = Annotated[int, Field(ge=-(2**53), le=2**53)]
_Token = Annotated[StrictInt, Field(ge=0, le=2**31 - 1)]
_KINDS = ("sampler_weights", "weights")


class CreateSamplingSession(Body):
    """See `create_sampling_session`."""

    session_id: Id
    sampling_session_seq_id: Number
    base_model: Text | None = None
    model_path: Text | None = None


class JoinSamplingSession(Body):
    """See `join_sampling_session`."""

    sampling_session_id: Text


class SamplingParams(Body):
    """The sampling parameters of `SampleBody`; see `operations.Sample`."""

    max_tokens: Whole | None = None
    seed: Seed | None = None
    stop: StrictStr | list[StrictStr] | list[_Token] | None = None
    temperature: float = 1.0
    top_k: Whole = -1
    top_p: float = 1.0


class SampleBody(Body):
    """See `asample`."""

    prompt: dict[str, Any]
    sampling_params: SamplingParams = SamplingParams()
    num_samples: int = 1
    sampling_session_id: Text | None = None
    seq_id: Number
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: Whole | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=2**20)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=2**20)] = 0
    target_prompt_logprobs: dict[str, Any] | None = None
    prompt_alt_tokens_k: Annotated[int, Field(ge=0, le=2**20)] = 0
    record_stability_info: bool | None = None


@router.post("/create_sampling_session", openapi_extra=body_schema(CreateSamplingSession))
async def create_sampling_session(request: Request) -> Response:
    """Create a sampling session for the base model or a checkpoint."""
    caller, state = caller_of(request), app_state_of(request)
    body = await read(request, CreateSamplingSession)
    check_base(state, body.base_model)
    if body.base_model is None and body.model_path is None:
        raise BadRequest("base_model or model_path is required")
    name = sampler_id(body.session_id, body.sampling_session_seq_id)
    base = state.service.info.name
    sampler = Sampler(name, caller.tenant, body.session_id, body.sampling_session_seq_id, base, now())
    if body.model_path is not None:
        path = CheckpointPath.parse(body.model_path)
        if path.kind not in _KINDS:
            raise BadRequest(f"model_path must be tinker://<run>/<{'|'.join(_KINDS)}>/<name>, got {path}")
        checkpoint = await state.store.checkpoints.find(caller.tenant, path, now())
        check_base(state, checkpoint.base)
        check_sampled(checkpoint, str(path))
        sampler.path, sampler.folder = str(path), checkpoint.folder
    await state.store.samplers.create(sampler)
    return json_response({"type": "create_sampling_session", "sampling_session_id": name})


@router.get("/samplers/{sampler_id}")
async def sampler(request: Request, sampler_id: str) -> Response:
    """Describe a sampling session."""
    caller, state = caller_of(request), app_state_of(request)
    record = await state.store.samplers.get(caller.tenant, sampler_id)
    return json_response(without_none(sampler_id=record.id, base_model=record.base, model_path=record.path))


@router.post("/join_sampling_session", openapi_extra=body_schema(JoinSamplingSession))
async def join_sampling_session(request: Request) -> Response:
    """Return a number for another client of a sampling session, from which its sequence numbers start."""
    caller, state = caller_of(request), app_state_of(request)
    body = await read(request, JoinSamplingSession)
    number = await state.store.samplers.join(caller.tenant, body.sampling_session_id)
    return json_response({"type": "join_sampling_session", "client_counter": number})


@router.post("/asample", openapi_extra=body_schema(SampleBody))
async def asample(request: Request) -> Response:
    """Sample sequences for a prompt."""
    caller, state = caller_of(request), app_state_of(request)
    body = await read(request, SampleBody)
    most = state.settings.limits.samples
    if not 1 <= body.num_samples <= most:
        raise BadRequest(f"num_samples must be between 1 and {most}, got {body.num_samples}")
    if body.sampling_session_id is None:
        raise BadRequest("sampling_session_id is required; create a sampling session first")
    sampler = await state.sampler(caller, body.sampling_session_id)
    if sampler.ended is not None:
        raise Gone(f"sampling session {sampler.id!r} has ended")
    context = state.service.info.context
    if len(await request.body()) <= LARGE:
        submission = _submission(context, caller, sampler, body)
    else:
        submission = await asyncio.to_thread(_submission, context, caller, sampler, body)
    accepted = await state.service.submit(submission, _recording(caller, sampler, body))
    sequences = [f"{accepted.request}:{index}" for index in range(body.num_samples)]
    return accepted_response(accepted, sample_sequence_ids=sequences)


def _recording(caller: Caller, sampler: Sampler, body: SampleBody) -> Callable[[Any], None] | None:
    """Return the function that records a request for use in training; None unless requested."""
    if not body.record_stability_info:
        return None
    tenant, session, queue_id, number = caller.tenant, sampler.session, sampler.id, body.seq_id
    return lambda connection: recorded.add(connection, tenant, session, queue_id, number, now())


def _submission(context: int, caller: Caller, sampler: Sampler, body: SampleBody) -> Submission:
    params = body.sampling_params
    sample = Sample(
        [],
        body.num_samples,
        source=None if sampler.inflight else sampler.folder,
        inflight=sampler.inflight,
        max_tokens=params.max_tokens,
        seed=secrets.randbits(48) if params.seed is None else params.seed,
        stop=[params.stop] if isinstance(params.stop, str) else params.stop,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        prompt_logprobs=bool(body.prompt_logprobs),
        prompt_logprobs_last_n=body.prompt_logprobs_last_n,
        topk_prompt_logprobs=body.topk_prompt_logprobs,
        topk_sample_logprobs=body.topk_sample_logprobs,
        targets=body.target_prompt_logprobs,
        alternatives=body.prompt_alt_tokens_k,
    )
    refusal, cost = None, 0
    try:
        sample.tokens = prompt_tokens(body.prompt)
        cost = check_sample(sample, context)
        data = sample.dump()
    except (ValueError, BadRequest) as error:
        refusal, data = str(error), Sample([]).dump()
    original = body.model_dump_json().encode()
    return Submission(
        caller.tenant, sampler.id, "sample", data, body.seq_id, tokens=cost, refusal=refusal, original=original
    )
