"""OpenAI's embeddings, by adapters that were trained for them."""

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from twinkle_server.app_state import AppState, Caller, app_state_of, caller_of
from twinkle_server.chat.bodies import EmbeddingsBody
from twinkle_server.chat.errors import InvalidParameter
from twinkle_server.chat.exchange import Disconnected, while_connected
from twinkle_server.chat.models import Target, resolve
from twinkle_server.chat.openai import GONE
from twinkle_server.chat.preparing import check_length, renderer_of
from twinkle_server.errors import NotFound
from twinkle_server.operations import Embed
from twinkle_server.requests import body_schema, json_response, read
from twinkle_server.store.records import Checkpoint

router = APIRouter()
TASK, EMBEDDING = "task", "embedding"
"""Key and value of the metadata of a model, or of a checkpoint, that was trained for embeddings."""


@router.post("/embeddings", openapi_extra=body_schema(EmbeddingsBody))
async def embeddings(request: Request) -> Any:
    """Return a vector of length 1 for each text."""
    caller, state = caller_of(request), app_state_of(request)
    body = await read(request, EmbeddingsBody)
    target = await resolve(state, caller, body.model)
    if not await _embeds(state, caller, target):
        raise InvalidParameter(
            "model", f"the model {body.model[:300]!r} was not trained for embeddings; its metadata must have "
            f"{TASK}={EMBEDDING!r}", "unsupported_model",
        )  # fmt: skip
    rows = await _rows(state, body.input)
    generation = await state.service.generate(caller.tenant, _request(target, rows))
    try:
        await while_connected(request, generation.parts())
    except Disconnected:
        return Response(status_code=GONE)
    finally:
        generation.cancel()
    vectors = np.frombuffer((generation.end or {})["body"], np.float32).reshape(len(rows), -1)
    data = [
        {"object": "embedding", "index": index, "embedding": _written(vector, body.encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": generation.prompt, "total_tokens": generation.prompt}
    return json_response({"object": "list", "data": data, "model": body.model, "usage": usage})


async def _embeds(state: AppState, caller: Caller, target: Target) -> bool:
    record = target.record
    if record is None:
        return False
    if (record.metadata or {}).get(TASK) == EMBEDDING:
        return True
    if not isinstance(record, Checkpoint):
        return False
    try:
        model = await state.store.models.get(caller.tenant, record.run)
    except NotFound:
        return False  # a published checkpoint of another tenant
    return (model.metadata or {}).get(TASK) == EMBEDDING


async def _rows(state: AppState, given: Any) -> list[list[int]]:
    rows = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    if isinstance(rows[0], str):
        check_length(state, max(map(len, rows)))
        rows = await renderer_of(state).texts(rows)
    info = state.service.info
    for row in rows:
        if not 0 < len(row) <= info.context:
            raise InvalidParameter("input", f"a text must have 1 to {info.context} tokens, got {len(row)}")
        if wrong := [token for token in row if token >= info.vocabulary]:
            raise InvalidParameter("input", f"token ids must be below {info.vocabulary}, got {wrong[0]}")
    if (total := sum(map(len, rows))) > state.settings.limits.request_tokens:
        raise InvalidParameter(
            "input", f"all texts together must have at most {state.settings.limits.request_tokens} tokens, got {total}"
        )
    return rows


def _request(target: Target, rows: list[list[int]]) -> Embed:
    record = target.record
    if record is None:
        raise ValueError("the base model has no vectors")
    return Embed(
        rows, target.source, target.model, record.rank, record.train_attn, record.train_mlp, record.train_unembed
    )


def _written(vector: Any, encoding: str | None) -> str | Sequence[float]:
    if encoding == "base64":
        return base64.b64encode(vector.tobytes()).decode()
    floats: list[float] = vector.tolist()
    return floats
