"""Endpoints for sessions of clients: created, kept alive, finished, and searched."""

import hashlib
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import AwareDatetime, Field

from twinkle_server.app_state import Caller, app_state_of, caller_of, now
from twinkle_server.ids import new_id
from twinkle_server.requests import (
    Body,
    Id,
    Limit,
    Metadata,
    Offset,
    Text,
    body_schema,
    isoformat,
    json_response,
    read,
    without_none,
)
from twinkle_server.store.records import Session, write_cursor
from twinkle_server.store.sessions import SessionSearch
from twinkle_server.telemetry.logs import redact

router = APIRouter()


class CreateSession(Body):
    """See `create_session`."""

    tags: Annotated[list[Text], Field(default_factory=list, max_length=256)]
    user_metadata: Metadata | None = None
    sdk_version: Text | None = None
    project_id: Id | None = None
    display_name: Text | None = None


class Heartbeat(Body):
    """See `session_heartbeat`."""

    session_id: Text


class _Reason(Body):
    type: Literal["success", "errored", "interrupted"] = "success"


class Finish(Body):
    """See `finish`."""

    reason: _Reason | None = None
    detail: Annotated[str, Field(max_length=2**16)] | None = None


class Project(Body):
    """See `set_project`."""

    project_id: Id


class _Owner(Body):
    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: Annotated[list[Text], Field(default_factory=list)]


class _Status(Body):
    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: list[Literal["success", "errored", "interrupted"]] | None = None


class _Cursor(Body):
    last_created_at: AwareDatetime
    last_session_id: Id

    def text(self) -> str:
        """Return the cursor in the format of the store."""
        return write_cursor(self.last_created_at.timestamp(), self.last_session_id)


class Search(Body):
    """See `search`."""

    session_id: Text | None = None
    project_ids: list[Id] | None = None
    user_metadata: Annotated[Metadata, Field(default_factory=dict)]
    display_name: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    owner: Annotated[_Owner, Field(default_factory=_Owner)]
    statuses: Annotated[list[_Status], Field(min_length=1, max_length=16)] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: _Cursor | None = None


@router.post("/create_session", openapi_extra=body_schema(CreateSession))
async def create_session(request: Request) -> Response:
    """Create a session; a retry with the same idempotency key returns the same session."""
    caller, state = caller_of(request), app_state_of(request)
    body = await read(request, CreateSession)
    begun = now()
    session = Session(
        _session_id(caller, body, request.headers.get("x-idempotency-key")),
        caller.tenant,
        begun,
        begun,
        sdk=body.sdk_version,
        tags=body.tags,
        metadata=body.user_metadata or {},
        project=body.project_id,
        display_name=body.display_name,
    )
    await state.store.sessions.create(session)
    return json_response({"type": "create_session", "session_id": session.id})


@router.post("/session_heartbeat", openapi_extra=body_schema(Heartbeat))
async def session_heartbeat(request: Request) -> Response:
    """Record a heartbeat; the response is 410 if the session is unknown or has ended, which stops the client."""
    caller, state = caller_of(request), app_state_of(request)
    body = await read(request, Heartbeat)
    await state.service.heartbeat(body.session_id, caller.tenant)
    return json_response({"type": "session_heartbeat"})


@router.post("/sessions/search", openapi_extra=body_schema(Search))
async def search(request: Request) -> Response:
    """Search the caller's sessions, newest first."""
    caller, state = caller_of(request), app_state_of(request)
    body = await read(request, Search)
    statuses = _statuses(body)
    others = body.owner.type == "user" and caller.tenant not in body.owner.owner_urns
    if others or (statuses is not None and not statuses):
        return json_response({"sessions": []})
    conditions = SessionSearch(
        session=body.session_id,
        projects=body.project_ids or [],
        metadata=body.user_metadata,
        display_name=body.display_name,
        statuses=statuses or [],
        limit=body.limit,
        cursor=None if body.cursor is None else body.cursor.text(),
    )
    page = await state.store.sessions.search(caller.tenant, conditions)
    rows = [row for row in page.rows if _matches_reason(row, body)]
    counts = await state.store.checkpoints.of_sessions(caller.tenant, [row.id for row in rows], now())
    last = page.rows[-1] if page.cursor else None
    cursor = last and {"last_created_at": isoformat(last.created), "last_session_id": last.id}
    summaries = [_summary(row, *counts.get(row.id, (0, 0))) for row in rows]
    return json_response(without_none(sessions=summaries, next_cursor=cursor))


@router.get("/sessions")
async def sessions(request: Request, limit: Limit = 20, offset: Offset = 0) -> Response:
    """List the caller's sessions, newest first."""
    caller, state = caller_of(request), app_state_of(request)
    page = await state.store.sessions.page(caller.tenant, limit, offset)
    return json_response({"sessions": [row.id for row in page.rows]})


@router.get("/sessions/{session_id}")
async def session(request: Request, session_id: str) -> Response:
    """Describe a session."""
    caller, state = caller_of(request), app_state_of(request)
    record = await state.store.sessions.get(caller.tenant, session_id)
    models = await state.store.models.of_session(caller.tenant, session_id)
    samplers = await state.store.samplers.of_session(caller.tenant, session_id)
    return json_response(
        without_none(
            training_run_ids=[model.id for model in models],
            sampler_ids=[sampler.id for sampler in samplers],
            user_metadata=record.metadata or None,
            display_name=record.display_name,
        )
    )


@router.post("/sessions/{session_id}/finish", openapi_extra=body_schema(Finish))
async def finish(request: Request, session_id: str) -> Response:
    """Finish a session; idempotent."""
    caller, state = caller_of(request), app_state_of(request)
    body = await read(request, Finish)
    reason = (body.reason or _Reason()).type
    detail = None if body.detail is None else redact(body.detail)  # often the text of an exception with headers
    if await state.store.sessions.end(caller.tenant, session_id, "finished", now(), reason, detail):
        state.samplers.forget()
        await state.service.finish_session(session_id)
    return json_response({})


@router.put("/sessions/{session_id}/project", openapi_extra=body_schema(Project))
async def set_project(request: Request, session_id: str) -> Response:
    """Set the project of a session."""
    caller, state = caller_of(request), app_state_of(request)
    body = await read(request, Project)
    await state.store.sessions.set_project(caller.tenant, session_id, body.project_id)
    return json_response({})


@router.get("/sessions/{session_id}/trace_export")
async def trace_export(request: Request, session_id: str) -> Response:
    """Report that traces are not supported."""
    caller, state = caller_of(request), app_state_of(request)
    await state.store.sessions.get(caller.tenant, session_id)
    return json_response({"status": "failed", "error": "this service does not record traces of sessions"})


def _session_id(caller: Caller, body: CreateSession, key: str | None) -> str:
    if key is None:
        return new_id()
    return hashlib.sha256(f"{caller.tenant}\0{key}\0{body.model_dump_json()}".encode()).hexdigest()[:32]


def _statuses(body: Search) -> list[str] | None:
    """Return the matching statuses of rows; the service has no "cancelled" and "failed"."""
    if body.statuses is None:
        return None
    known = {"active": "active", "client_finished": "finished"}
    return sorted({known[status.type] for status in body.statuses if status.type in known})


def _matches_reason(row: Session, body: Search) -> bool:
    if body.statuses is None or row.status != "finished":
        return True
    ends = [status for status in body.statuses if status.type == "client_finished"]
    return any(status.reasons is None or row.reason in status.reasons for status in ends)


def _summary(row: Session, count: int, size: int) -> dict[str, Any]:
    status: dict[str, Any] | None = None
    if row.status == "active":
        status = {"type": "active"}
    elif row.status == "finished":
        reason = {"type": row.reason or "success"}
        status = without_none(type="client_finished", reason=reason, detail=row.detail)
    return without_none(
        session_id=row.id,
        created_at=isoformat(row.created),
        owner=row.tenant,
        project_id=row.project or "default",
        status=status,
        checkpoints_count=count,
        display_name=row.display_name,
        user_metadata=row.metadata or None,
        checkpoint_storage_bytes=size,
    )
