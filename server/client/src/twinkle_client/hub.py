"""Uploads of checkpoints from a service to Hugging Face and ModelScope."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from twinkle.errors import ArgumentError, HubError
from twinkle_client.calls import Call, Sleep

if TYPE_CHECKING:
    from twinkle_client.http import Connection

_ENDED: Final = ("succeeded", "failed", "cancelled")
Progress = Callable[[dict[str, Any]], None]


def upload(
    connection: "Connection",
    checkpoint: Any,
    hub_model_id: str,
    hub_token: str | None = None,
    async_upload: bool = True,
    poll_interval: float = 5.0,
    *,
    wait: bool = True,
    private: bool = True,
    revision: str | None = None,
    path_in_repo: str = "",
    commit_message: str | None = None,
    timeout: float | None = None,
    progress: Progress | None = None,
) -> Call[dict[str, Any]]:
    """Upload a checkpoint of the service to a hub, and wait until the upload has ended.

    Args:
        connection: to the service.
        checkpoint: its `twinkle://` path, or the result of `save`.
        hub_model_id: `hf://owner/name`, `ms://owner/name`, or `owner/name` of the service's default hub.
        hub_token: a token of yours at the hub; by default that of `HF_TOKEN` or `MODELSCOPE_API_TOKEN`. The service
            neither stores nor logs it.
        async_upload: as published, whether the service uploads in the background. It always does, and the client asks
            for the state in both cases, so that a failed upload is an error.
        poll_interval: seconds between two questions for its state, while waiting.
        wait: wait until the upload has ended; otherwise return as soon as it has begun, see `upload_status`.
        private: whether a repository that is created is private.
        revision: branch of the repository.
        path_in_repo: folder in the repository.
        commit_message: by default the name of the checkpoint.
        timeout: seconds to wait; None waits until the upload has ended.
        progress: called with the state after every question.

    Returns:
        The state of the upload: `request_id`, `status`, and `url` after it has succeeded.

    Raises:
        HubError: the upload failed or was cancelled, or has not ended in time.
    """
    if not isinstance(async_upload, bool):
        raise ArgumentError(f"async_upload must be True or False, got {async_upload!r}")
    body = {
        **_target(hub_model_id, hub_token, private, revision, path_in_repo, commit_message),
        "checkpoint_path": _path_of(checkpoint),
    }
    state: dict[str, Any] = yield from connection.request("POST", "/hub/uploads", body=_json(body))
    ends = None if timeout is None else time.monotonic() + timeout
    while wait and state["status"] not in _ENDED:
        if ends is not None and time.monotonic() > ends:
            raise HubError(f"the upload {state['request_id']} to {hub_model_id} has not ended after {timeout:g} s")
        yield Sleep(poll_interval)
        state = yield from upload_status(connection, state["request_id"])
        if progress is not None:
            progress(state)
    if state["status"] in ("failed", "cancelled"):
        raise HubError(f"cannot upload to {hub_model_id}: {state.get('error')}")
    return state


def upload_status(connection: "Connection", request_id: str) -> Call[dict[str, Any]]:
    """Return the state of an upload.

    Raises:
        NotFound: there is no such upload, or the service was restarted since.
    """
    state: dict[str, Any] = yield from connection.request("GET", f"/hub/uploads/{request_id}")
    return state


def set_automatic(
    connection: "Connection",
    run: str,
    hub_model_id: str | None,
    hub_token: str | None = None,
    *,
    private: bool = True,
    revision: str | None = None,
    path_in_repo: str = "",
) -> Call[None]:
    """Upload every later checkpoint of a run; None as `hub_model_id` stops that.

    A restart of the service ends it, because tokens are kept in memory only.
    """
    if hub_model_id is None:
        yield from connection.request("DELETE", f"/hub/automatic/{run}")
        return
    body = _target(hub_model_id, hub_token, private, revision, path_in_repo, None)
    yield from connection.request("PUT", f"/hub/automatic/{run}", body=_json(body))


def _target(
    name: str, token: str | None, private: bool, revision: str | None, path: str, message: str | None
) -> dict[str, Any]:
    return {
        "hub_model_id": name, "hub_token": token_of(name, token), "private": private, "revision": revision,
        "path_in_repo": path, "commit_message": message,
    }  # fmt: skip


def token_of(name: str, given: str | None) -> str:
    """Return the token for a hub: the given one, or that of the environment.

    Raises:
        HubError: there is none.
    """
    import os

    if given:
        return given
    from twinkle.hub.local import default_hub, scheme_of

    variable = "HF_TOKEN" if (scheme_of(name) or default_hub()) == "hf" else "MODELSCOPE_API_TOKEN"
    token = os.environ.get(variable, "").strip()
    if not token:
        raise HubError(f"cannot upload to {name}: no token was given; give hub_token=, or set {variable}")
    return token


def _path_of(checkpoint: Any) -> str:
    return str(getattr(checkpoint, "twinkle_path", None) or getattr(checkpoint, "path", None) or checkpoint)


def _json(body: dict[str, Any]) -> bytes:
    import json

    return json.dumps(body).encode()
