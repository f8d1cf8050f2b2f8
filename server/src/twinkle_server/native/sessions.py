"""Endpoints for clients: sessions, heartbeats, and what the service offers."""

import hashlib
from typing import Any

from fastapi import APIRouter, Request, Response

from twinkle_client import types
from twinkle_server.app_state import Caller, app_state_of, caller_of, now
from twinkle_server.data import offered as data_components
from twinkle_server.engine.native import components
from twinkle_server.ids import new_id
from twinkle_server.native.bodies import call_schema, model_response, read_body
from twinkle_server.requests import json_response
from twinkle_server.store.records import Session
from twinkle_server.tenancy.quotas import count_adapters

router = APIRouter()


@router.post("/create_session", openapi_extra=call_schema(types.CreateSessionRequest))
async def create_session(request: Request) -> Response:
    """Create a session; a retry with the same idempotency key returns the same session."""
    caller, state = caller_of(request), app_state_of(request)
    body, begun = await read_body(request, types.CreateSessionRequest), now()
    name = _session_id(caller, body, request.headers.get("x-idempotency-key"))
    client = None if body.client_version is None else f"twinkle-client/{body.client_version}"
    session = Session(name, caller.tenant, begun, begun, sdk=client, tags=body.tags, metadata=body.metadata or {})
    await state.store.sessions.create(session)
    return json_response({"session_id": session.id})


@router.post("/session_heartbeat", openapi_extra=call_schema(types.SessionRequest))
async def session_heartbeat(request: Request) -> Response:
    """Record a heartbeat; the response is 410 if the session is unknown or has ended."""
    caller, state = caller_of(request), app_state_of(request)
    body = await read_body(request, types.SessionRequest)
    await state.service.heartbeat(body.session_id, caller.tenant)
    return json_response({"session_id": body.session_id})


@router.post("/finish_session", openapi_extra=call_schema(types.SessionRequest))
async def finish_session(request: Request) -> Response:
    """Finish a session: its models are saved and freed. Idempotent."""
    caller, state = caller_of(request), app_state_of(request)
    body = await read_body(request, types.SessionRequest)
    if await state.store.sessions.end(caller.tenant, body.session_id, "finished", now(), "success", None):
        state.samplers.forget()
        await state.service.finish_session(body.session_id)
    return json_response({"session_id": body.session_id})


@router.get("/healthz")
async def healthz(request: Request) -> Response:
    """Report that the service answers this key."""
    caller_of(request)
    return json_response({"status": "ok"})


@router.get("/get_server_capabilities")
async def get_server_capabilities(request: Request) -> Response:
    """Return the served models, and the components that requests may name, by kind."""
    caller_of(request)
    state = app_state_of(request)
    info = state.service.info
    model = types.SupportedModel(model_name=info.name, max_context_length=info.context or None)
    offered = {} if state.data is None else {kind: data_components.names(kind) for kind in data_components.KINDS}
    offered |= {kind: components.names(kind, state.settings.in_process_losses) for kind in components.SHIPPED}
    offered["loss"] = list(info.own_losses)
    return model_response(types.ServerCapabilities(supported_models=[model], components=offered))


@router.get("/capacity_info")
async def capacity_info(request: Request) -> Response:
    """Return how many models this key has, and may have."""
    caller, state = caller_of(request), app_state_of(request)

    def count(connection: Any) -> int:
        return count_adapters(connection, caller.tenant)

    used = await state.store.database.read(count)
    most = caller.quotas.get("adapters", state.settings.limits.adapters)
    limit = None if most is None else int(most)
    free = None if limit is None else max(0, limit - used)
    return model_response(types.CapacityInfoResponse(max_loras=limit, used_loras=used, free_loras=free))


def _session_id(caller: Caller, body: types.CreateSessionRequest, key: str | None) -> str:
    if key is None:
        return new_id()
    return hashlib.sha256(f"native\0{caller.tenant}\0{key}\0{body.model_dump_json()}".encode()).hexdigest()[:32]
