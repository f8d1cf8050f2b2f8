"""Endpoints for the caller's audit entries, usage, and API key."""

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from twinkle_server.app_state import app_state_of, caller_of, now
from twinkle_server.errors import BadRequest, NotFound
from twinkle_server.requests import isoformat, json_response, without_none
from twinkle_server.store.records import AuditEntry, Usage
from twinkle_server.store.tenants import day_of

router = APIRouter()
_TOKENS = ("training", "sampling_prefill", "sampling_sample")
_DAY = re.compile(r"(\d{4})-(\d{2})-(\d{2})")
_DAY_SECONDS = 86400.0
Word = Annotated[str, Query(max_length=128)]


@router.get("/audit")
async def audit(request: Request, event_type: Word = "all", day: Word | None = None) -> Response:
    """Return the audit entries of the caller's tenant, newest first, optionally of one day (UTC)."""
    caller, state = caller_of(request), app_state_of(request)
    since, until = (0.0, float("inf")) if day is None else _bounds(day)
    event = None if event_type == "all" else event_type
    entries = await state.store.audit.entries(caller.tenant, since, until, event)
    return json_response({"entries": [_entry(entry) for entry in entries]})


@router.get("/billing/usage/events")
async def usage_events(request: Request, starting_on: Word, ending_before: Word | None = None) -> Response:
    """Return the usage of the caller's tenant by day (UTC). The service does not do billing."""
    caller, state = caller_of(request), app_state_of(request)
    first = day_of(_bounds(starting_on)[0])
    end = day_of(now() + _DAY_SECONDS) if ending_before is None else day_of(_bounds(ending_before)[0])
    base = state.service.info.name
    events = [
        _event(used, base)
        for used in await state.store.usage.between(caller.tenant, first, end)
        if used.kind in _TOKENS
    ]
    return json_response({"data": events, "sessions": {}})


@router.get("/billing/usage/checkpoints/current")
async def checkpoint_usage(request: Request, project_id: Word | None = None) -> Response:
    """Return number and bytes of the caller's checkpoints, optionally of one project."""
    caller, state = caller_of(request), app_state_of(request)
    page = await state.store.checkpoints.page(caller.tenant, now(), limit=0, project=project_id)
    size = await state.store.checkpoints.bytes(caller.tenant, now(), project_id)
    item = without_none(project_id=project_id, checkpoint_count=page.total, size_bytes=size, size_gigabytes=size / 1e9)
    return json_response({"data": [item]})


@router.get("/auth/apikey/me")
async def key(request: Request) -> Response:
    """Return the identity of the caller's key."""
    caller = caller_of(request)
    return json_response({"id": caller.key, "tenant": caller.tenant, "role": caller.role})


@router.delete("/auth/apikey/me")
async def revoke_key(request: Request) -> Response:
    """Refuse: only the operator can revoke keys."""
    caller_of(request)
    raise NotFound("only the operator can revoke keys: twinkle server keys revoke NAME")


def _bounds(day: str) -> tuple[float, float]:
    """Return begin and end of a day in UTC seconds; a time of day in the text is ignored."""
    match = _DAY.match(day)
    try:
        if match is None:
            raise ValueError(day)
        begin = datetime(*(int(part) for part in match.groups()), tzinfo=UTC)  # type: ignore[misc, arg-type]
        return begin.timestamp(), (begin + timedelta(days=1)).timestamp()
    except (ValueError, OverflowError) as error:
        raise BadRequest(f"the date must have the form YYYY-MM-DD, got {day!r}") from error


def _entry(entry: AuditEntry) -> dict[str, Any]:
    return {"timestamp": isoformat(entry.time), "event": entry.event, "event_details": entry.details}


def _event(used: Usage, base: str) -> dict[str, Any]:
    begins, ends = _bounds(used.day)
    info = {"type": used.kind, "token_count": used.tokens}
    if used.kind == "sampling_prefill":
        info["cached"] = False
    return {"bucket_start": isoformat(begins), "bucket_end": isoformat(ends), "base_model": base, "event_info": info}
