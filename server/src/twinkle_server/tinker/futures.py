"""Endpoints for results of operations; a request for a result waits until it is available or the poll time ends.

The finished requests of a sampling session are a stream that a client reads by cursor, a time in microseconds. Requests
that end almost simultaneously may become visible out of order, so each response looks back a little; clients identify
requests by id and accept repetitions.

The id of a custom loss is its whole graph, so its future needs no storage and is always resolved.
"""

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field
from sqlalchemy import Connection, select

from twinkle_server.app_state import AppState, app_state_of, caller_of
from twinkle_server.errors import BadRequest
from twinkle_server.openapi import returns
from twinkle_server.operations import NATIVE, Future
from twinkle_server.requests import LARGE, Body, Id, Number, Text, body_schema, json_response, read, without_none
from twinkle_server.store.records import Sampler
from twinkle_server.store.tables import operations
from twinkle_server.wire.loss_graphs import MAX_BYTES, PREFIX, loss_id, read_graph, read_loss_id

router = APIRouter()
PROTOBUF = "application/x-protobuf"
_LONGEST = 40.0  # seconds; clients give up after 45
_UNWATCHED = 0.5  # seconds of a poll without checks whether its client is connected
_MESSAGES = ("sample", "forward", "forward_backward")


class RetrieveFuture(Body):
    """See `retrieve_future`; the option to retrieve only metadata is ignored."""

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


@router.post("/retrieve_future", openapi_extra=body_schema(RetrieveFuture) | returns(PROTOBUF))
async def retrieve_future(request: Request) -> Response:
    """Return the result or the error of an operation, or `try_again` while it is pending."""
    caller, state = caller_of(request), app_state_of(request)
    body = await read(request, RetrieveFuture)
    if (response := custom_loss_answer(body.request_id)) is not None:
        return response
    future = await _wait(request, state, body.request_id, caller.tenant)
    if future.status == "pending":
        return _try_again(state, body.request_id, future)
    if future.status == "cancelled":
        return _failed("the request was cancelled", "user")
    if future.status == "failed" or future.result is None:
        return _failed(future.error or "the operation failed", future.category)
    if future.kind in NATIVE:
        return _failed("this is the request of a native call; get its result from /twinkle/futures", "user")
    if future.kind not in _MESSAGES:
        return Response(future.result, media_type="application/json")
    if _accepts_only_json(request):
        return await _as_json(future.kind, future.result)
    return Response(future.result, media_type=PROTOBUF)


@router.post("/cancel_future", openapi_extra=body_schema(CancelFuture))
async def cancel_future(request: Request) -> Response:
    """Cancel an operation."""
    caller, state = caller_of(request), app_state_of(request)
    body = await read(request, CancelFuture)
    await state.service.cancel(body.request_id, caller.tenant)
    return json_response({})


@router.post("/retrieve_futures", openapi_extra=body_schema(RetrieveFutures))
async def retrieve_futures(request: Request) -> Response:
    """Return the requests of a sampling session that finished since the previous response.

    The results are retrieved one by one, and kept as long as all others.
    """
    caller, state = caller_of(request), app_state_of(request)
    body = await read(request, RetrieveFutures)
    sampler = await state.sampler(caller, body.target.sampling_session_id)
    seconds = min(state.settings.times.poll if body.timeout is None else body.timeout, _LONGEST)
    requests, cursor = await completions(state, sampler, body.target.cloned_sampler_id, body.prev_cursor, seconds)
    return json_response({"completions": requests, "cursor": cursor})


async def _wait(request: Request, state: AppState, request_id: str, tenant: str) -> Future:
    """Wait for a future while its client is connected; most are resolved before the first check of the connection.

    The response to a client that has disconnected is not sent; the wait only ends early.
    """
    seconds = min(state.settings.times.poll, _LONGEST)
    future = await state.service.wait(request_id, tenant, min(seconds, _UNWATCHED))
    if future.status != "pending" or seconds <= _UNWATCHED:
        return future
    wait = asyncio.create_task(state.service.wait(request_id, tenant, seconds - _UNWATCHED))
    left = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({wait, left}, return_when=asyncio.FIRST_COMPLETED)
        return wait.result() if wait.done() else future
    finally:
        wait.cancel()
        left.cancel()
        await asyncio.wait({wait, left})


async def _disconnected(request: Request) -> None:
    """Return when the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        await asyncio.sleep(_UNWATCHED)


def _try_again(state: AppState, request_id: str, future: Future) -> Response:
    queue_state, reason = state.service.queue_state(future.queue_id)
    return json_response(
        without_none(type="try_again", request_id=request_id, queue_state=queue_state, queue_state_reason=reason)
    )


def _failed(error: str, category: str) -> Response:
    return json_response({"error": error, "category": category})


def _accepts_only_json(request: Request) -> bool:
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
"""Numbers of each client of a sampling session start at a multiple of this."""
_LOOK_BACK = 10_000_000  # microseconds
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds
_MOST = 4096


async def completions(
    state: AppState, sampler: Sampler, clone: int, cursor: int, seconds: float
) -> tuple[list[dict[str, Any]], int]:
    """Return finished requests, and the cursor for later ones.

    Args:
        state: of the application.
        sampler: of the caller.
        clone: number of the client within the sampling session.
        cursor: of the previous response; 0 at first.
        seconds: maximum time to wait for a finished request.
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
    requests = [
        {"state": "failed" if status != "done" else "finished", "request_id": request} for request, status, _ in rows
    ]
    return requests, max(newest, cursor)


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


MAX_WIRE_BYTES = 16 * MAX_BYTES
"""Maximum size of a request with a graph, whose JSON form is longer than its id."""


class Graph(Body):
    """The graph of `CreateCustomLoss`."""

    format: Literal[1] = 1
    nodes: list[dict[str, Any]]


class CreateCustomLoss(Body):
    """See `create_custom_loss`."""

    session_id: Id
    custom_loss_seq_id: Number
    name: Text = ""
    inputs: Annotated[list[dict[str, Any]], Field(default_factory=list)]
    graph: Graph


@router.post("/create_custom_loss", openapi_extra=body_schema(CreateCustomLoss))
async def create_custom_loss(request: Request) -> Response:
    """Check a custom loss, and return its id for later passes; the id is also the id of its resolved future."""
    caller, state = caller_of(request), app_state_of(request)
    body = await read(request, CreateCustomLoss)
    if not state.settings.custom_losses:
        raise BadRequest(
            "custom losses are disabled on this service (enable them with --custom-losses); use "
            "forward_backward_custom, which computes the loss in the client, or the name of a loss plugin that is "
            "installed on the service"
        )
    if (size := len(await request.body())) > MAX_WIRE_BYTES:
        raise BadRequest(f"the body of a custom loss must have at most {MAX_WIRE_BYTES} bytes, got {size}")
    await state.store.sessions.get(caller.tenant, body.session_id)
    try:
        custom_id = loss_id(read_graph(body.inputs, body.graph.nodes))
    except ValueError as error:
        raise BadRequest(f"custom loss {body.name[:80]!r}: {error}") from error
    return json_response({"request_id": custom_id})


def custom_loss_answer(request_id: str) -> Response | None:
    """Return the response for the future of a custom loss; None for any other future."""
    if not request_id.startswith(PREFIX):
        return None
    try:
        read_loss_id(request_id)
    except ValueError:
        return None
    return json_response({"loss_id": request_id, "type": "create_custom_loss"})
