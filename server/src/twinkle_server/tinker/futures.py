"""Results of operations: a request for one is held until it is there, or for as long as clients wait."""

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from twinkle_server.operations import Future
from twinkle_server.tinker.answers import answer, present
from twinkle_server.tinker.app_state import AppState, app_state_of, caller
from twinkle_server.tinker.bodies import LARGE, Body, Number, Text, read, takes
from twinkle_server.tinker.completions import completions
from twinkle_server.tinker.custom_losses import custom_loss_answer

router = APIRouter()
PROTOBUF = "application/x-protobuf"
_LONGEST = 40.0  # seconds; clients give up after 45
_UNWATCHED = 0.5  # seconds of a poll in which nobody looks whether its client is still there
_MESSAGES = ("sample", "forward", "forward_backward")


class RetrieveFuture(Body):
    """See `retrieve_future`; whether metadata would do makes no difference here."""

    request_id: Annotated[str, Field(max_length=2**17)]


class CancelFuture(Body):
    """See `cancel_future`."""

    request_id: Text


class _Target(Body):
    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: Text
    cloned_sampler_id: Number = 0


class RetrieveFutures(Body):
    """See `retrieve_futures`."""

    target: _Target
    prev_cursor: Number = 0
    timeout: Annotated[float, Field(ge=0)] | None = None
    retrieved_request_ids: Annotated[list[Text], Field(default_factory=list, max_length=100_000)]


@router.post("/retrieve_future", openapi_extra=takes(RetrieveFuture))
async def retrieve_future(request: Request) -> Response:
    """Return the result of an operation, its error, or `try_again` where it is not over."""
    who, state = caller(request), app_state_of(request)
    body = await read(request, RetrieveFuture)
    if (made := custom_loss_answer(body.request_id)) is not None:
        return made
    future = await _wait(request, state, body.request_id, who.tenant)
    if future.status == "pending":
        return _try_again(state, body.request_id, future)
    if future.status == "cancelled":
        return _failed("the request was cancelled", "user")
    if future.status == "failed" or future.result is None:
        return _failed(future.error or "the operation failed", future.category)
    if future.kind not in _MESSAGES:
        return Response(future.result, media_type="application/json")
    if _reads_json_alone(request):
        return await _as_json(future.kind, future.result)
    return Response(future.result, media_type=PROTOBUF)


@router.post("/cancel_future", openapi_extra=takes(CancelFuture))
async def cancel_future(request: Request) -> Response:
    """Drop an operation that nobody waits for any more."""
    who, state = caller(request), app_state_of(request)
    body = await read(request, CancelFuture)
    await state.service.cancel(body.request_id, who.tenant)
    return answer({})


@router.post("/retrieve_futures", openapi_extra=takes(RetrieveFutures))
async def retrieve_futures(request: Request) -> Response:
    """Return which requests of a sampling session are over since the answer before; the results are fetched one by one.

    Results are kept as long as any others: that a client has them changes nothing.
    """
    who, state = caller(request), app_state_of(request)
    body = await read(request, RetrieveFutures)
    sampler = await state.sampler(who, body.target.sampling_session_id)
    seconds = min(state.settings.times.poll if body.timeout is None else body.timeout, _LONGEST)
    found, cursor = await completions(state, sampler, body.target.cloned_sampler_id, body.prev_cursor, seconds)
    return answer({"completions": found, "cursor": cursor})


async def _wait(request: Request, state: AppState, request_id: str, tenant: str) -> Future:
    """Wait for a future, for as long as its client does; most are over before it is worth a look whether it is there.

    A client that has left gets an answer that nobody reads; what counts is that nothing waits for it any more.
    """
    seconds = min(state.settings.times.poll, _LONGEST)
    future = await state.service.wait(request_id, tenant, min(seconds, _UNWATCHED))
    if future.status != "pending" or seconds <= _UNWATCHED:
        return future
    wait = asyncio.create_task(state.service.wait(request_id, tenant, seconds - _UNWATCHED))
    left = asyncio.create_task(_left(request))
    try:
        await asyncio.wait({wait, left}, return_when=asyncio.FIRST_COMPLETED)
        return wait.result() if wait.done() else future
    finally:
        wait.cancel()
        left.cancel()
        await asyncio.wait({wait, left})


async def _left(request: Request) -> None:
    """Return when the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        await asyncio.sleep(_UNWATCHED)


def _try_again(state: AppState, request_id: str, future: Future) -> Response:
    queue_state, reason = state.service.queue_state(future.queue_id)
    return answer(present(type="try_again", request_id=request_id, queue_state=queue_state, queue_state_reason=reason))


def _failed(error: str, category: str) -> Response:
    return answer({"error": error, "category": category})


def _reads_json_alone(request: Request) -> bool:
    accepted = request.headers.get("accept", "")
    return "json" in accepted and "protobuf" not in accepted


async def _as_json(kind: str, result: bytes) -> Response:
    from twinkle_server.wire.json_bodies import pass_json, sample_json

    write: Any = sample_json if kind == "sample" else pass_json
    try:
        data = write(result) if len(result) <= LARGE else await asyncio.to_thread(write, result)
    except ValueError as error:
        return _failed(str(error), "user")
    return Response(data, media_type="application/json")
