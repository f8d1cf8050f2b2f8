"""OpenAI's embeddings."""

from typing import Any

from fastapi import APIRouter, Request

from twinkle_server.app_state import app_state_of, caller_of
from twinkle_server.chat.bodies import EmbeddingsBody
from twinkle_server.chat.errors import InvalidParameter
from twinkle_server.chat.models import resolve
from twinkle_server.requests import body_schema, read

router = APIRouter()


@router.post("/embeddings", openapi_extra=body_schema(EmbeddingsBody))
async def embeddings(request: Request) -> Any:
    """Return vectors of texts."""
    body = await read(request, EmbeddingsBody)
    await resolve(app_state_of(request), caller_of(request), body.model)
    raise InvalidParameter("model", f"the model {body.model[:300]!r} was not trained for embeddings", "model_not_found")
