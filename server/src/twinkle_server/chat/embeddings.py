"""OpenAI's embeddings, by adapters that were trained for them."""

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from twinkle_server.app_state import AppState, app_state_of, caller_of
from twinkle_server.chat.bodies import EmbeddingsBody
from twinkle_server.chat.errors import InvalidParameter
from twinkle_server.chat.exchange import Disconnected, while_connected
from twinkle_server.chat.models import Target, resolve
from twinkle_server.chat.openai import GONE
from twinkle_server.chat.preparing import check_length, renderer_of
from twinkle_server.operations import EMBEDDING, Embed
from twinkle_server.requests import body_schema, json_response, read
from twinkle_server.store.records import EMBEDS, Checkpoint, Model, embeds
from twinkle_server.wire.codec import Array

router = APIRouter()


@router.post("/embeddings", openapi_extra=body_schema(EmbeddingsBody))
async def embeddings(request: Request) -> Any:
    """Return a vector of length 1 for each text."""
    caller, state = caller_of(request), app_state_of(request)
    body = await read(request, EmbeddingsBody)
    target = await resolve(state, caller, body.model)
    if target.record is None or not embeds(target.record.metadata):
        raise InvalidParameter(
            "model", f"the model {body.model[:300]!r} was not trained for embeddings; train an adapter with "
            f"task={EMBEDDING!r}, or set {dict(EMBEDS)} in the metadata of one that was", "unsupported_model",
        )  # fmt: skip
    rows = await _rows(state, body.input)
    generation = await state.service.generate(caller.tenant, _request(target, target.record, rows))
    try:
        await while_connected(request, generation.parts())
    except Disconnected:
        return Response(status_code=GONE)
    finally:
        generation.cancel()
    vectors = _cut(np.frombuffer((generation.end or {})["body"], np.float32).reshape(len(rows), -1), body.dimensions)
    data = [
        {"object": "embedding", "index": index, "embedding": _written(vector, body.encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": generation.prompt, "total_tokens": generation.prompt}
    return json_response({"object": "list", "data": data, "model": body.model, "usage": usage})


async def _rows(state: AppState, given: Any) -> list[list[int]]:
    rows = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    if isinstance(rows[0], str):
        check_length(state, max(map(len, rows)), "input")
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


def _request(target: Target, record: Model | Checkpoint, rows: list[list[int]]) -> Embed:
    return Embed(
        rows, target.source, target.model, record.rank, record.train_attn, record.train_mlp, record.train_unembed
    )


def _cut(vectors: Array, dimensions: int | None) -> Array:
    """Return the first dimensions of vectors `[N, H]`, scaled to length 1 again, as OpenAI's `dimensions` does.

    Raises:
        InvalidParameter: the vectors have fewer dimensions.
    """
    if dimensions is None or dimensions == vectors.shape[1]:
        return vectors
    if dimensions > vectors.shape[1]:
        raise InvalidParameter("dimensions", f"dimensions must be at most {vectors.shape[1]}, got {dimensions}")
    first = vectors[:, :dimensions]
    lengths = np.linalg.norm(first.astype(np.float64), axis=1, keepdims=True)
    return np.asarray(first / np.maximum(lengths, np.finfo(np.float32).tiny), np.float32)


def _written(vector: Any, encoding: str | None) -> str | Sequence[float]:
    if encoding == "base64":
        return base64.b64encode(vector.tobytes()).decode()
    floats: list[float] = vector.tolist()
    return floats
