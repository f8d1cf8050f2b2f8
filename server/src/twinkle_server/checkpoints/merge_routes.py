"""Routes that merge checkpoints into the base model; the merged model is downloaded as any external checkpoint."""

from typing import Any, Final

from fastapi import APIRouter, Request, Response
from pydantic import Field

from twinkle_server.app_state import app_state_of, caller_of, now
from twinkle_server.checkpoints.merge_jobs import Job, MergeJobs
from twinkle_server.ids import CheckpointPath, check_name
from twinkle_server.requests import StrictBody, Text, body_schema, json_response, read
from twinkle_server.tinker.saves import check_ttl

PATH: Final = "/twinkle/merge"
_WEEK: Final = 7 * 86400


class Merge(StrictBody):
    """See `merge`."""

    path: Text = Field(description="`tinker://` path of an own checkpoint for sampling or of external weights.")
    name: Text | None = Field(None, description="Name of the merged model; by default the checkpoint's with -merged.")
    ttl_seconds: int | None = Field(_WEEK, description="Lifetime of the merged model; null is unlimited.")


def merge_routes(jobs: MergeJobs) -> APIRouter:
    """Return the routes."""
    router = APIRouter()

    @router.post(PATH, openapi_extra=body_schema(Merge))
    async def merge(request: Request) -> Response:
        """Merge a checkpoint into the base model in the background; a repeated request returns the same job."""
        caller, body = caller_of(request), await read(request, Merge)
        path = CheckpointPath.parse(body.path)
        name = check_name(f"{path.name}-merged"[:128] if body.name is None else body.name)
        job = await jobs.submit(caller, path, name, check_ttl(body.ttl_seconds))
        return json_response(_fields(job))

    @router.get(PATH)
    async def merges(request: Request) -> Response:
        """List the caller's merges, newest first."""
        return json_response({"merges": [_fields(job) for job in jobs.of(caller_of(request).tenant)]})

    @router.get(f"{PATH}/{{job}}")
    async def merge_status(request: Request) -> Response:
        """Return the state of a merge; once it is done, with signed links to the files."""
        caller, state = caller_of(request), app_state_of(request)
        job = jobs.get(caller.tenant, request.path_params["job"])
        fields = _fields(job)
        if job.status == "done":
            checkpoint = await state.store.checkpoints.get(caller.tenant, CheckpointPath.parse(job.target), now())
            urls, expires = state.require_links().files(str(request.base_url), checkpoint.folder)
            fields |= {"urls": urls, "urls_expire": expires, "size_bytes": checkpoint.size}
        return json_response(fields)

    return router


def _fields(job: Job) -> dict[str, Any]:
    return {
        "id": job.id,
        "source": job.source,
        "path": job.target,
        "status": job.status,
        "done_bytes": job.done,
        "total_bytes": job.total,
        "error": job.error,
    }
