"""Endpoints of uploads to hubs, `/twinkle/hub/...`. Answers never contain a token."""

from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from fastapi import Path as InPath
from pydantic import Field, SecretStr

from twinkle.hub.local import default_hub, scheme_of
from twinkle_server.app_state import AppState, app_state_of, caller_of, now
from twinkle_server.errors import NotFound
from twinkle_server.hub_uploads.uploads import HubUploads, Target, Upload
from twinkle_server.ids import CheckpointPath, new_id
from twinkle_server.requests import StrictBody, body_schema, isoformat, json_response, read, without_none

router = APIRouter()
_SCHEME = "twinkle://"
Text = Annotated[str, Field(max_length=512)]
Path = Annotated[str, InPath(min_length=1, max_length=256)]


class UploadTarget(StrictBody):
    """Where checkpoints are uploaded.

    Attributes:
        hub_model_id: `hf://owner/name`, `ms://owner/name`, or `owner/name` of the service's default hub.
        hub_token: a token of the caller at the hub, which is kept in memory only.
        private: whether a repository that is created is private.
        revision: branch of the repository.
        path_in_repo: folder in the repository.
        commit_message: by default the name of the checkpoint.
    """

    hub_model_id: Annotated[str, Field(min_length=1, max_length=256)]
    hub_token: SecretStr
    private: bool = True
    revision: Text | None = None
    path_in_repo: Text = ""
    commit_message: Text | None = None


class UploadRequest(UploadTarget):
    """See `begin`.

    Attributes:
        checkpoint_path: `twinkle://<run>/<kind>/<name>`.
    """

    checkpoint_path: Annotated[str, Field(min_length=1, max_length=1024)]


@router.post("/hub/uploads", openapi_extra=body_schema(UploadRequest))
async def begin(request: Request) -> Response:
    """Begin to upload a checkpoint of the caller to a hub, and return the id of the upload."""
    caller, state, uploads = caller_of(request), app_state_of(request), uploads_of(request)
    body = await read(request, UploadRequest)
    path = CheckpointPath.parse(body.checkpoint_path.replace(_SCHEME, "tinker://", 1))
    checkpoint = await state.store.checkpoints.get(caller.tenant, path, now())
    key = request.headers.get("x-idempotency-key") or new_id()
    return json_response(_fields(uploads.begin(caller.tenant, checkpoint, _target(body), key)))


@router.get("/hub/uploads")
async def listed(request: Request) -> Response:
    """Return the caller's uploads, oldest first."""
    uploads = uploads_of(request).of(caller_of(request).tenant)
    return json_response({"uploads": [_fields(upload) for upload in uploads]})


@router.get("/hub/uploads/{upload_id}")
async def status(request: Request, upload_id: Path) -> Response:
    """Return the state of an upload."""
    return json_response(_fields(uploads_of(request).get(caller_of(request).tenant, upload_id)))


@router.delete("/hub/uploads/{upload_id}")
async def cancel(request: Request, upload_id: Path) -> Response:
    """Cancel an upload; one that has ended stays as it is."""
    return json_response(_fields(uploads_of(request).cancel(caller_of(request).tenant, upload_id)))


@router.put("/hub/automatic/{run}", openapi_extra=body_schema(UploadTarget))
async def set_automatic(request: Request, run: Path) -> Response:
    """Upload every later checkpoint of a run. A restart of the service ends this, because tokens are not stored."""
    caller, state, uploads = caller_of(request), app_state_of(request), uploads_of(request)
    target = _target(await read(request, UploadTarget))
    await state.model(caller, run)
    uploads.set_automatic(caller.tenant, run, target)
    return json_response(_automatic(target))


@router.get("/hub/automatic/{run}")
async def automatic(request: Request, run: Path) -> Response:
    """Return where the checkpoints of a run are uploaded; `hub_model_id` is null if they are not."""
    caller, state = caller_of(request), app_state_of(request)
    await state.model(caller, run)
    return json_response(_automatic(uploads_of(request).automatic(caller.tenant, run)))


@router.delete("/hub/automatic/{run}")
async def end_automatic(request: Request, run: Path) -> Response:
    """Stop uploading the checkpoints of a run."""
    caller, state = caller_of(request), app_state_of(request)
    await state.model(caller, run)
    uploads_of(request).set_automatic(caller.tenant, run, None)
    return json_response(_automatic(None))


def uploads_of(request: Request) -> HubUploads:
    """Return the uploads of the service.

    Raises:
        NotFound: the service does not upload checkpoints.
    """
    state: AppState = app_state_of(request)
    if state.uploads is None:
        raise NotFound("this service does not upload checkpoints to hubs")
    return state.uploads


def _target(body: UploadTarget) -> Target:
    name = body.hub_model_id
    reference = name if scheme_of(name) else f"{default_hub()}://{name}"
    token = body.hub_token.get_secret_value()
    return Target(reference, token, body.private, body.revision, body.path_in_repo, body.commit_message)


def _fields(upload: Upload) -> dict[str, Any]:
    return without_none(
        request_id=upload.id,
        status=upload.status,
        checkpoint_path=f"{_SCHEME}{str(upload.checkpoint.path).partition('://')[2]}",
        hub_model_id=upload.target.reference,
        private=upload.target.private,
        files=upload.files,
        bytes=upload.size,
        attempts=upload.attempts,
        url=upload.url,
        error=upload.error,
        changed=isoformat(upload.changed),
    )


def _automatic(target: Target | None) -> dict[str, Any]:
    return {"hub_model_id": None if target is None else target.reference, "private": target is None or target.private}
