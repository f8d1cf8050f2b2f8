"""Bodies and responses of the native protocol: JSON, or a binary frame with tensors.

An operation's response has its result if it ends soon, and otherwise the id by which the result is requested.
"""

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import orjson
from fastapi import Query, Request, Response
from pydantic import BaseModel, ValidationError

from twinkle_client import wire
from twinkle_client.errors import WireError
from twinkle_server.app_state import AppState, Caller
from twinkle_server.errors import BadRequest, Unprocessable
from twinkle_server.openapi import JSON, returns
from twinkle_server.operations import NATIVE, Accepted, Future
from twinkle_server.requests import LARGE, json_response, validation_message, without_none

B = TypeVar("B", bound=BaseModel)
SeqId = Annotated[int, Query(ge=1, le=2**62, description="number of the operation in the queue of its model")]
_SOON = 10.0
"""Seconds for which the response to an operation waits for its result; a body counts as in memory until then."""
_LARGE_SOON = 0.2
_LONGEST = 40.0
RESULT: dict[str, Any] = {
    "responses": {
        **returns(wire.CONTENT_TYPE)["responses"],
        **returns(JSON, status=202, description="The operation is pending")["responses"],
    }
}
"""`openapi_extra` of endpoints that answer with the result of an operation."""


def is_frame(request: Request) -> bool:
    """Return whether the body of a request is a frame."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == wire.CONTENT_TYPE


async def read_body(request: Request, kind: type[B]) -> B:
    """Parse a body.

    Raises:
        BadRequest: it is neither JSON nor a frame.
        Unprocessable: a field is missing, unknown or invalid.
    """
    data = await request.body()
    if len(data) <= LARGE:
        return parse_body(data, kind, frame=is_frame(request))
    return await asyncio.to_thread(parse_body, data, kind, frame=is_frame(request))


def parse_body(data: bytes, kind: type[B], *, frame: bool, lists: bool = True) -> B:
    """See `read_body`; `lists` is that of `wire.unpack`."""
    try:
        value = wire.unpack(data, lists=lists) if frame else orjson.loads(data or b"{}")
    except (WireError, ValueError) as error:
        raise BadRequest(f"cannot parse the request body: {error}") from error
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise Unprocessable(validation_message(error)) from error


async def operation_response(state: AppState, caller: Caller, accepted: Accepted, size: int = 0) -> Response:
    """Return the response to an accepted operation: its result, if it ends soon, or its id.

    Args:
        state: of the application.
        caller: the caller.
        accepted: the operation.
        size: of the request's body, which stays in memory meanwhile.
    """
    seconds = min(state.settings.times.poll, _SOON if size <= LARGE else _LARGE_SOON)
    return await future_response(state, caller, accepted.request, seconds)


async def future_response(state: AppState, caller: Caller, request_id: str, seconds: float) -> Response:
    """Return the state of an operation, after it has ended or `seconds` have passed."""
    future = await state.service.wait(request_id, caller.tenant, min(seconds, _LONGEST))
    response = _of_future(state, request_id, future)
    response.headers["X-Twinkle-Request"] = request_id
    return response


def _of_future(state: AppState, request_id: str, future: Future) -> Response:
    if future.status == "pending":
        queue_state, reason = state.service.queue_state(future.queue_id)
        pending = without_none(status="pending", request_id=request_id, queue_state=queue_state, reason=reason)
        return json_response(pending, 202)
    if future.status == "cancelled":
        return json_response({"status": "cancelled", "error": "the request was cancelled", "category": "user"})
    if future.status == "failed" or future.result is None:
        error = future.error or "the operation failed"
        return json_response({"status": "failed", "error": error, "category": future.category})
    if future.kind in NATIVE:
        return Response(future.result, media_type=wire.CONTENT_TYPE)
    if future.kind in ("sample", "forward", "forward_backward"):
        return frame_response({"value": _message(future)})
    return json_response({"value": orjson.loads(future.result)})


def _message(future: Future) -> Any:
    """Return the result of another protocol's operation."""
    from twinkle_server.wire import codec

    if future.kind == "sample":
        return future.result
    outputs, metrics = codec.read_forward_backward_output(future.result or b"")
    return {"outputs": outputs, "metrics": metrics}


def frame_response(value: Any, status: int = 200) -> Response:
    """Return a value as a frame."""
    return Response(wire.pack(value), status, media_type=wire.CONTENT_TYPE)


def model_response(body: BaseModel) -> Response:
    """Return a pydantic model as JSON, without what it does not know."""
    return json_response(body.model_dump(exclude_none=True))


def call_schema(kind: type[BaseModel], parameters: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the OpenAPI description of an endpoint that reads its request itself.

    Args:
        kind: model of the body.
        parameters: descriptions of required integers in the query.
    """
    schema = inlined(kind.model_json_schema())
    content: dict[str, Any] = {"schema": schema}
    body = {"required": True, "content": {"application/json": content, wire.CONTENT_TYPE: content}}
    query = [
        {
            "name": name,
            "in": "query",
            "required": True,
            "description": text,
            "schema": {"type": "integer", "minimum": 1},
        }
        for name, text in (parameters or {}).items()
    ]
    return {"requestBody": body} | ({"parameters": query} if query else {})


def inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON schema without references to definitions of its own."""
    parts = schema.pop("$defs", {})

    def fill(value: Any) -> Any:
        if isinstance(value, list):
            return [fill(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "$ref" in value:
            return fill(parts[value["$ref"].rpartition("/")[2]])
        return {key: fill(item) for key, item in value.items()}

    filled: dict[str, Any] = fill(schema)
    return filled
