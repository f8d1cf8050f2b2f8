"""Endpoints for results of operations."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from twinkle_server.app_state import app_state_of, caller_of
from twinkle_server.native.bodies import RESULT, future_response
from twinkle_server.requests import json_response

router = APIRouter()


@router.get("/futures/{request_id}", openapi_extra=RESULT)
async def future(request: Request, request_id: str, wait: Annotated[float, Query(ge=0, le=40)] = 25.0) -> Response:
    """Return the result of an operation: 200 when it has ended, 202 while it is pending after `wait` seconds."""
    caller, state = caller_of(request), app_state_of(request)
    return await future_response(state, caller, request_id, min(wait, state.settings.times.poll))


@router.post("/futures/{request_id}/cancel")
async def cancel(request: Request, request_id: str) -> Response:
    """Cancel an operation that has not started, or a sampling request."""
    caller, state = caller_of(request), app_state_of(request)
    await state.service.cancel(request_id, caller.tenant)
    return json_response({"request_id": request_id})
