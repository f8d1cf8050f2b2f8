"""Endpoints for training runs and their checkpoints."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from twinkle_client import types
from twinkle_client.types.base import Request as RequestBody
from twinkle_server.app_state import app_state_of, caller_of, now
from twinkle_server.errors import BadRequest, NotFound
from twinkle_server.ids import CheckpointPath
from twinkle_server.native.bodies import call_schema, model_response, read_body
from twinkle_server.requests import Limit, Offset, cursor, isoformat, json_response
from twinkle_server.store.records import Checkpoint, Model

router = APIRouter()
_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
_CHECKPOINT = "/training_runs/{run_id}/checkpoints/{kind}/{name}"


class WeightsInfo(RequestBody):
    """See `weights_info`."""

    twinkle_path: Annotated[str, Field(max_length=4096)]


@router.get("/training_runs")
async def training_runs(
    request: Request, limit: Limit = 20, offset: Offset = 0,
    base_model: Annotated[str | None, Query(max_length=4096)] = None,
) -> Response:  # fmt: skip
    """List the caller's training runs, newest first."""
    caller, state = caller_of(request), app_state_of(request)
    page = await state.store.models.page(caller.tenant, limit, offset, None)
    latest = await state.store.checkpoints.latest(caller.tenant, [row.id for row in page.rows], now())
    runs = [_run(row, latest) for row in page.rows if base_model in (None, row.base)]
    return json_response({"training_runs": runs, "cursor": cursor(page, limit, offset)})


@router.get("/training_runs/{run_id}")
async def training_run(request: Request, run_id: str) -> Response:
    """Describe a training run."""
    caller, state = caller_of(request), app_state_of(request)
    model = await state.store.models.get(caller.tenant, run_id)
    return json_response(_run(model, await state.store.checkpoints.latest(caller.tenant, [run_id], now())))


@router.get("/training_runs/{run_id}/checkpoints")
async def checkpoints(
    request: Request, run_id: str, limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000, offset: Offset = 0
) -> Response:
    """List the checkpoints of a training run, newest first."""
    caller, state = caller_of(request), app_state_of(request)
    page = await state.store.checkpoints.page(caller.tenant, now(), limit, offset, run_id)
    if not page.total:
        await state.store.models.get(caller.tenant, run_id)
    found = [checkpoint_of(row).model_dump(exclude_none=True) for row in page.rows]
    return json_response({"checkpoints": found, "cursor": cursor(page, limit, offset)})


@router.delete(_CHECKPOINT)
async def delete_checkpoint(request: Request, run_id: str, kind: str, name: str) -> Response:
    """Delete a checkpoint; sampling sessions created from it keep working."""
    caller, state = caller_of(request), app_state_of(request)
    await state.store.checkpoints.delete(caller.tenant, _path(run_id, kind, name), now())
    return json_response({})


@router.get("/checkpoint_path/{run_id}/{kind}/{name}")
async def checkpoint_path(request: Request, run_id: str, kind: str, name: str) -> Response:
    """Return the path of a checkpoint, from its run and id."""
    caller, state = caller_of(request), app_state_of(request)
    path = _path(run_id, kind, name)
    await state.store.checkpoints.find(caller.tenant, path, now())
    parsed = types.ParsedCheckpointTwinklePath(
        path=path.twinkle, twinkle_path=path.twinkle, training_run_id=path.run, checkpoint_type=_TYPES[path.kind],
        checkpoint_id=f"{path.kind}/{path.name}",
    )  # fmt: skip
    return model_response(parsed)


@router.post("/weights_info", openapi_extra=call_schema(WeightsInfo))
async def weights_info(request: Request) -> Response:
    """Return what a model must be to load a checkpoint."""
    caller, state = caller_of(request), app_state_of(request)
    path = CheckpointPath.parse((await read_body(request, WeightsInfo)).twinkle_path)
    checkpoint = await state.store.checkpoints.find(caller.tenant, path, now())
    return model_response(
        types.WeightsInfoResponse(
            training_run_id=path.run, base_model=checkpoint.base,
            is_lora=checkpoint.rank > 0, lora_rank=checkpoint.rank or None,
            model_owner=caller.tenant if checkpoint.tenant == caller.tenant else None,
        )
    )  # fmt: skip


def _path(run: str, kind: str, name: str) -> CheckpointPath:
    """Return the path of a checkpoint in a route.

    Raises:
        NotFound: the path is invalid.
    """
    try:
        return CheckpointPath.parse(f"twinkle://{run}/{kind}/{name}")
    except BadRequest:
        raise NotFound(f"checkpoint {name[:140]!r} of kind {kind[:40]!r} does not exist") from None


def checkpoint_of(row: Checkpoint) -> types.Checkpoint:
    """Return a checkpoint as the client has it."""
    return types.Checkpoint(
        checkpoint_id=f"{row.kind}/{row.name}", checkpoint_type=_TYPES[row.kind], time=isoformat(row.created),
        size_bytes=row.size, public=row.public, twinkle_path=row.path.twinkle, base_model=row.base,
        is_lora=row.rank > 0, lora_rank=row.rank or None,
        train_unembed=row.train_unembed, train_mlp=row.train_mlp, train_attn=row.train_attn,
        has_optimizer=row.has_optimizer, user_metadata=row.metadata,
        expires_at=None if row.expires is None else isoformat(row.expires),
    )  # fmt: skip


def _run(row: Model, latest: dict[tuple[str, str], Checkpoint]) -> dict[str, object]:
    weights, sampler = latest.get((row.id, "weights")), latest.get((row.id, "sampler_weights"))
    run = types.TrainingRun(
        training_run_id=row.id, base_model=row.base, model_owner=row.tenant, corrupted=row.status == "corrupted",
        is_lora=row.rank > 0, lora_rank=row.rank or None, last_request_time=isoformat(row.last_request),
        last_checkpoint=None if weights is None else checkpoint_of(weights),
        last_sampler_checkpoint=None if sampler is None else checkpoint_of(sampler), user_metadata=row.metadata,
    )  # fmt: skip
    return run.model_dump(exclude_none=True)
