"""Sampling sessions, and requests for samples from them."""

import asyncio
import secrets
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field, StrictInt, StrictStr

from twinkle_server.errors import BadRequest, Gone
from twinkle_server.ids import CheckpointPath, sampler_id
from twinkle_server.operations import Submission
from twinkle_server.payloads import Sample
from twinkle_server.store import recorded
from twinkle_server.store.records import Sampler
from twinkle_server.tinker.answers import answer, present, promise
from twinkle_server.tinker.app_state import Caller, app_state_of, caller, now
from twinkle_server.tinker.bodies import LARGE, Body, Id, Number, Seed, Text, read, takes
from twinkle_server.tinker.models import check_base
from twinkle_server.tinker.prompts import check_sample, prompt_tokens

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
    """Of `SampleBody`; see `payloads.Sample`."""

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


@router.post("/create_sampling_session", openapi_extra=takes(CreateSamplingSession))
async def create_sampling_session(request: Request) -> Response:
    """Begin to sample: from the base model, or from a checkpoint that stays as it is."""
    who, state = caller(request), app_state_of(request)
    body = await read(request, CreateSamplingSession)
    check_base(state, body.base_model)
    if body.base_model is None and body.model_path is None:
        raise BadRequest("send base_model or model_path: what is to be sampled from?")
    name = sampler_id(body.session_id, body.sampling_session_seq_id)
    base = state.service.info.name
    sampler = Sampler(name, who.tenant, body.session_id, body.sampling_session_seq_id, base, now())
    if body.model_path is not None:
        path = CheckpointPath.parse(body.model_path)
        if path.kind not in _KINDS:
            raise BadRequest(f"{path} is not for sampling: tinker://<run>/sampler_weights/<name> is")
        found = await state.store.checkpoints.find(who.tenant, path, now())
        check_base(state, found.base)
        sampler.path, sampler.folder = str(path), found.folder
    await state.store.samplers.create(sampler)
    return answer({"type": "create_sampling_session", "sampling_session_id": name})


@router.get("/samplers/{sampler_id}")
async def sampler(request: Request, sampler_id: str) -> Response:
    """Describe a sampling session."""
    who, state = caller(request), app_state_of(request)
    found = await state.store.samplers.get(who.tenant, sampler_id)
    return answer(present(sampler_id=found.id, base_model=found.base, model_path=found.path))


@router.post("/join_sampling_session", openapi_extra=takes(JoinSamplingSession))
async def join_sampling_session(request: Request) -> Response:
    """Give a copy of a client a number of its own, from which it counts its requests."""
    who, state = caller(request), app_state_of(request)
    body = await read(request, JoinSamplingSession)
    number = await state.store.samplers.join(who.tenant, body.sampling_session_id)
    return answer({"type": "join_sampling_session", "client_counter": number})


@router.post("/asample", openapi_extra=takes(SampleBody))
async def asample(request: Request) -> Response:
    """Sample sequences for a prompt."""
    who, state = caller(request), app_state_of(request)
    body = await read(request, SampleBody)
    most = state.settings.limits.samples
    if not 1 <= body.num_samples <= most:
        raise BadRequest(f"num_samples is {body.num_samples}; 1 to {most} can be had")
    if body.sampling_session_id is None:
        raise BadRequest("sampling_session_id is missing: create a sampling session first")
    sampler = await state.sampler(who, body.sampling_session_id)
    if sampler.ended is not None:
        raise Gone(f"sampling session {sampler.id!r} has ended")
    context = state.service.info.context
    if len(await request.body()) <= LARGE:
        submission = _submission(context, who, sampler, body)
    else:
        submission = await asyncio.to_thread(_submission, context, who, sampler, body)
    accepted = await state.service.submit(submission, _recording(who, sampler, body))
    sequences = [f"{accepted.request}:{index}" for index in range(body.num_samples)]
    return promise(accepted, sample_sequence_ids=sequences)


def _recording(who: Caller, sampler: Sampler, body: SampleBody) -> Callable[[Any], None] | None:
    """Return what notes that a request's sequences may be named in training; None if that was not asked for."""
    if not body.record_stability_info:
        return None
    tenant, session, lane, number = who.tenant, sampler.session, sampler.id, body.seq_id
    return lambda connection: recorded.add(connection, tenant, session, lane, number, now())


def _submission(context: int, who: Caller, sampler: Sampler, body: SampleBody) -> Submission:
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
    asked = body.model_dump_json().encode()
    return Submission(who.tenant, sampler.id, "sample", data, body.seq_id, tokens=cost, refusal=refusal, asked=asked)
