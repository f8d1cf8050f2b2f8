"""Uploads: a call waits for the end of the upload, and a failed upload is an error."""

import json

import httpx
import pytest

from twinkle.errors import ArgumentError, HubError
from twinkle_client import Connection
from twinkle_client.hub import upload


def hub_of(*statuses: str) -> tuple[Connection, list[str]]:
    """Return a connection to a service whose upload has one status after the other, and the requests that arrive."""
    requests: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        status = statuses[len(requests)]
        requests.append(request.method)
        if request.method == "POST":
            assert "wait" not in json.loads(request.content)
        state = {"request_id": "u1", "status": status, "error": "the hub refuses the token"}
        return httpx.Response(200, json=state)

    return Connection("http://127.0.0.1:9", transport=httpx.MockTransport(answer)), requests


@pytest.mark.parametrize("in_background", [True, False])
def test_an_upload_is_awaited_in_both_published_forms(in_background: bool) -> None:
    connection, requests = hub_of("queued", "running", "failed")
    with pytest.raises(HubError, match="cannot upload to hf://a/b: the hub refuses the token"):
        connection.run(upload(connection, "twinkle://r/weights/x", "hf://a/b", "hf_wrong", in_background, 0.0))
    assert requests == ["POST", "GET", "GET"]
    connection, requests = hub_of("queued", "succeeded")
    done = connection.run(upload(connection, "twinkle://r/weights/x", "hf://a/b", "hf_right", in_background, 0.0))
    assert done["status"] == "succeeded"


def test_an_upload_can_be_left_alone() -> None:
    connection, requests = hub_of("queued")
    begun = connection.run(upload(connection, "twinkle://r/weights/x", "hf://a/b", "hf_right", wait=False))
    assert (begun["status"], requests) == ("queued", ["POST"])
    with pytest.raises(ArgumentError, match="async_upload must be True or False, got 5"):
        connection.run(upload(connection, "twinkle://r/weights/x", "hf://a/b", "hf_right", 5))  # type: ignore[arg-type]
