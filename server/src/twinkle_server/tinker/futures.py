"""Results of operations: a request for one is held until it is there, or for as long as clients wait.

Which requests of a sampling session are over is a stream that a client reads by cursor: a time in microseconds.
Requests that end at almost the same time may become visible in another order, so each answer looks back a little; a
client knows requests by their ids and minds no repetition.

A loss that a client brings along as a graph has itself as its id, and its future is over at once: nothing is kept here.
"""

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field
from sqlalchemy import Connection, select

from twinkle_server.errors import BadRequest
from twinkle_server.operations import Future
from twinkle_server.store.records import Sampler
from twinkle_server.store.tables import operations
from twinkle_server.tinker.app_state import AppState, app_state_of, caller
from twinkle_server.tinker.requests import LARGE, Body, Id, Number, Text, answer, present, read, takes
from twinkle_server.wire.loss_graphs import MOST_BYTES, PREFIX, loss_id, read_graph, read_loss_id

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


CLONE = 1_000_000_000
"""Numbers of a sampling session's clients begin at multiples of this."""
_LOOK_BACK = 10_000_000  # microseconds
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds
_MOST = 4096


async def completions(
    state: AppState, sampler: Sampler, clone: int, cursor: int, seconds: float
) -> tuple[list[dict[str, Any]], int]:
    """Return requests that are over, and the cursor for those after them.

    Args:
        state: see there.
        sampler: of the caller.
        clone: which of its clients asks.
        cursor: of the answer before; 0 begins at the beginning.
        seconds: to wait for one if there is none.
    """
    ends = asyncio.get_running_loop().time() + seconds
    pause = _FIRST_PAUSE
    while True:
        rows = await state.store.database.read(lambda connection: _ended(connection, sampler, clone, cursor))
        newest = max((when for _, _, when in rows), default=0)
        left = ends - asyncio.get_running_loop().time()
        if newest > cursor or left <= 0:
            break
        await asyncio.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE)
    found = [
        {"state": "failed" if status != "done" else "finished", "request_id": request} for request, status, _ in rows
    ]
    return found, max(newest, cursor)


def _ended(connection: Connection, sampler: Sampler, clone: int, cursor: int) -> list[tuple[str, str, int]]:
    query = (
        select(operations.c.request, operations.c.status, operations.c.finished)
        .where(
            operations.c.tenant == sampler.tenant,
            operations.c.lane == sampler.id,
            operations.c.number >= clone * CLONE,
            operations.c.number < (clone + 1) * CLONE,
            operations.c.finished > (cursor - _LOOK_BACK) / 1e6,
        )
        .order_by(operations.c.finished, operations.c.id)
        .limit(_MOST)
    )
    return [(row.request, row.status, round(row.finished * 1e6)) for row in connection.execute(query)]


MOST_WIRE_BYTES = 16 * MOST_BYTES
"""Of a request that brings a graph, which says the same in more words than an id does."""


class Graph(Body):
    """Of `CreateCustomLoss`."""

    format: Literal[1] = 1
    nodes: list[dict[str, Any]]


class CreateCustomLoss(Body):
    """See `create_custom_loss`."""

    session_id: Id
    custom_loss_seq_id: Number
    name: Text = ""
    inputs: Annotated[list[dict[str, Any]], Field(default_factory=list)]
    graph: Graph


@router.post("/create_custom_loss", openapi_extra=takes(CreateCustomLoss))
async def create_custom_loss(request: Request) -> Response:
    """Check a loss, and return the id by which passes name it; its future is its id, and is over."""
    who, state = caller(request), app_state_of(request)
    body = await read(request, CreateCustomLoss)
    if not state.settings.custom_losses:
        raise BadRequest(
            "custom losses are disabled on this service (enable them with --custom-losses); use "
            "forward_backward_custom, which computes the loss in the client, or the name of a loss plugin that is "
            "installed on the service"
        )
    if (size := len(await request.body())) > MOST_WIRE_BYTES:
        raise BadRequest(f"the body of a custom loss must have at most {MOST_WIRE_BYTES} bytes, got {size}")
    await state.store.sessions.get(who.tenant, body.session_id)
    try:
        made = loss_id(read_graph(body.inputs, body.graph.nodes))
    except ValueError as error:
        raise BadRequest(f"custom loss {body.name[:80]!r}: {error}") from error
    return answer({"request_id": made})


def custom_loss_answer(request_id: str) -> Response | None:
    """Return the answer to who asks for the future of a custom loss; None if it is another future."""
    if not request_id.startswith(PREFIX):
        return None
    try:
        read_loss_id(request_id)
    except ValueError:
        return None
    return answer({"loss_id": request_id, "type": "create_custom_loss"})
