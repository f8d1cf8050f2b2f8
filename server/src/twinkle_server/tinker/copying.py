"""Copies of checkpoints with the same files, owned by the caller."""

import asyncio
import contextlib
import hashlib
from typing import Any

from fastapi import APIRouter, Request, Response

from twinkle_server.app_state import AppState, Caller, app_state_of, caller_of, now
from twinkle_server.engine.files import Damaged, copy_checkpoint
from twinkle_server.errors import BadRequest, NotFound, SequenceConflict, Unprocessable
from twinkle_server.ids import CheckpointPath, model_id, new_id
from twinkle_server.requests import Body, Id, Number, Text, body_schema, json_response, read
from twinkle_server.store import checkpoints, models
from twinkle_server.store.records import Checkpoint, Model
from twinkle_server.tenancy.quotas import check_quotas
from twinkle_server.tinker.models import check_free
from twinkle_server.tinker.saves import check_ttl

router = APIRouter()


class CopyWeights(Body):
    """See `copy_weights`."""

    source_path: Text
    session_id: Id | None = None
    model_seq_id: Number | None = None
    destination_project_id: Id | None = None
    ttl_seconds: int | None = None
    weights_access_token: Text | None = None


@router.post("/copy_weights", openapi_extra=body_schema(CopyWeights))
async def copy_weights(request: Request) -> Response:
    """Copy a checkpoint of the caller, or a published one, into a new run of the caller."""
    caller, state = caller_of(request), app_state_of(request)
    body = await read(request, CopyWeights)
    if body.weights_access_token is not None or "x-tinker-weights-access-token" in request.headers:
        raise BadRequest("access tokens of other accounts are not supported; publish the checkpoint to allow copies")
    if (body.session_id is None) != (body.model_seq_id is None):
        raise Unprocessable("session_id and model_seq_id must be given together")
    ttl = check_ttl(body.ttl_seconds)
    source = CheckpointPath.parse(body.source_path)
    run = _run(caller, body, request.headers.get("x-idempotency-key"))
    target = CheckpointPath(run, source.kind, source.name)
    if not await _exists(state, caller, source, target, body):
        checkpoint = await state.store.checkpoints.find(caller.tenant, source, now())
        try:
            await _copy(state, caller, checkpoint, target, body, ttl)
        except (BadRequest, SequenceConflict):  # unless a concurrent retry of this request was faster
            if not await _exists(state, caller, source, target, body):
                raise
    return json_response({"tinker_path": str(target)})


def _run(caller: Caller, body: CopyWeights, key: str | None) -> str:
    """Return the run of the copy; a retried request gets the same run."""
    if body.session_id is not None and body.model_seq_id is not None:
        return model_id(body.session_id, body.model_seq_id)
    if key is None:
        return new_id()
    return hashlib.sha256(f"{caller.tenant}\0{key}\0{body.source_path}".encode()).hexdigest()[:32]


async def _exists(
    state: AppState, caller: Caller, source: CheckpointPath, target: CheckpointPath, body: CopyWeights
) -> bool:
    """Return whether this copy already exists.

    Raises:
        SequenceConflict: another copy exists under this number or key.
    """
    try:
        copy = await state.store.checkpoints.get(caller.tenant, target, now())
    except NotFound:
        return False
    ttl = None if copy.expires is None else round(copy.expires - copy.created)
    same = (copy.project, ttl) == (body.destination_project_id, body.ttl_seconds)
    with contextlib.suppress(NotFound):  # the source may have been deleted since
        same &= (await state.store.checkpoints.find(caller.tenant, source, now())).digest == copy.digest
    if not same:
        raise SequenceConflict(f"{target} already exists and is another copy; increment model_seq_id")
    return True


async def _copy(
    state: AppState, caller: Caller, source: Checkpoint, target: CheckpointPath, body: CopyWeights, ttl: int | None
) -> None:
    data, folder, begun = state.settings.data, f"checkpoints/{new_id()}", now()
    await state.store.database.read(lambda connection: check_quotas(connection, caller, "save", begun))
    try:
        published = await asyncio.to_thread(copy_checkpoint, data / source.folder, data / folder)
    except Damaged as error:
        raise NotFound(f"the files of {source.path} no longer exist") from error
    copy = Checkpoint(
        caller.tenant,
        target.run,
        target.kind,
        target.name,
        folder,
        published.size,
        published.digest,
        source.base,
        source.rank,
        begun,
        expires=None if ttl is None else begun + ttl,
        train_attn=source.train_attn,
        train_mlp=source.train_mlp,
        train_unembed=source.train_unembed,
        has_optimizer=source.has_optimizer,
        metadata=source.metadata,
        project=body.destination_project_id,
    )

    def write(connection: Any) -> None:
        check_quotas(connection, caller, "save", begun)
        if body.session_id is not None and body.model_seq_id is not None:
            check_free(connection, caller.tenant, copy.run)
            models.add(connection, _slot(caller, copy, body.session_id, body.model_seq_id))
        checkpoints.add(connection, copy)

    await state.store.database.write(write)


def _slot(caller: Caller, copy: Checkpoint, session: str, number: int) -> Model:
    """Return the row of a copy's run in a session; it has no model."""
    return Model(
        copy.run,
        caller.tenant,
        session,
        number,
        copy.base,
        copy.rank,
        copy.created,
        copy.created,
        train_attn=copy.train_attn,
        train_mlp=copy.train_mlp,
        train_unembed=copy.train_unembed,
        status="gone",
        reason="this run only holds a copy of a checkpoint",
    )
