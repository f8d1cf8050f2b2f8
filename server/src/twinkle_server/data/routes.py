"""Endpoints of data resources, `/twinkle/data/...`. Arguments and results are frames of `twinkle_client.wire`."""

from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi import Path as InPath

from twinkle_client.wire import CONTENT_TYPE
from twinkle_server.app_state import app_state_of, caller_of
from twinkle_server.data.resources import DataResources, Resource
from twinkle_server.errors import NotFound
from twinkle_server.ids import new_id
from twinkle_server.openapi import returns
from twinkle_server.requests import json_response

router = APIRouter()
_FRAME: dict[str, Any] = {
    "requestBody": {
        "required": False,
        "content": {CONTENT_TYPE: {"schema": {"type": "string", "format": "binary"}}},
    }
}
Name = Annotated[str, Query(min_length=1, max_length=128)]
ResourceId = Annotated[str, InPath(min_length=1, max_length=128)]


@router.post("/data", openapi_extra=_FRAME)
async def create(
    request: Request,
    session_id: Annotated[str, Query(min_length=1, max_length=256)],
    kind: Name,
    name: Name,
    parent: Annotated[str | None, Query(min_length=1, max_length=128)] = None,
    x_idempotency_key: Annotated[str | None, Header(max_length=256)] = None,
) -> Response:
    """Create a data resource: a data set, a loader, a template, a processor, a preprocessor, a filter or a reward.

    The body is a frame `{"args": [...], "kwargs": {...}}`. A loader gets its data set as `{"$resource": id}` and is
    created in the process of it (`parent`).
    """
    caller, resources = caller_of(request), resources_of(request)
    made = await resources.create(
        caller.tenant, session_id, kind, name, await request.body(), key=x_idempotency_key or new_id(), parent=parent
    )
    return json_response(_fields(made))


@router.get("/data")
async def listed(request: Request) -> Response:
    """Return the caller's data resources."""
    caller, resources = caller_of(request), resources_of(request)
    return json_response({"resources": [_fields(resource) for resource in resources.of(caller.tenant)]})


@router.post("/data/{resource_id}/call", openapi_extra=_FRAME | returns(CONTENT_TYPE, json=False))
async def call(
    request: Request,
    resource_id: ResourceId,
    method: Name,
    number: Annotated[int, Query(ge=1, le=2**53)],
) -> Response:
    """Call a method of a resource.

    Calls of a resource are numbered from 1. A repetition of the last call returns its result, without another call.
    """
    caller, resources = caller_of(request), resources_of(request)
    frame = await resources.call(caller.tenant, resource_id, method, number, await request.body())
    return Response(frame, media_type=CONTENT_TYPE)


@router.delete("/data/{resource_id}")
async def delete(request: Request, resource_id: ResourceId) -> Response:
    """Delete a resource, and its process if it was the last one in it."""
    resources_of(request).delete(caller_of(request).tenant, resource_id)
    return json_response({})


def resources_of(request: Request) -> DataResources:
    """Return the data resources of the service.

    Raises:
        NotFound: the service does not offer any.
    """
    resources = app_state_of(request).data
    if resources is None:
        raise NotFound("this service does not offer data resources")
    return resources


def _fields(resource: Resource) -> dict[str, Any]:
    return {
        "resource_id": resource.id,
        "session_id": resource.session,
        "kind": resource.kind,
        "name": resource.name,
        "calls": resource.number,
    }
