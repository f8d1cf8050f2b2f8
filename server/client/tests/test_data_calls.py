"""Numbered calls of a data resource: a request that the service refused has used no number."""

import httpx
import pytest

from twinkle.errors import ArgumentError
from twinkle_client import errors, wire
from twinkle_client.data import DataResource
from twinkle_client.http import Connection


class Service:
    """One resource, whose calls are numbered; the scripted answers come first.

    Attributes:
        calls: bodies of the calls that were made, in order.
    """

    def __init__(self) -> None:
        self.calls: list[bytes] = []
        self.first: list[httpx.Response] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/data"):
            return httpx.Response(200, json={"resource_id": "data-1"})
        if self.first:
            return self.first.pop(0)
        number = int(request.url.params["number"])
        if number == len(self.calls) + 1:
            self.calls.append(request.content)
        elif number != len(self.calls) or request.content != self.calls[-1]:
            return httpx.Response(409, json={"detail": f"the next call must have number {len(self.calls) + 1}"})
        if request.url.params["method"] == "fail":
            return httpx.Response(422, json={"detail": "k must be at least 1, got 0", "error": "ArgumentError"})
        body = wire.pack(wire.unpack(request.content)["kwargs"])
        return httpx.Response(200, content=body, headers={"content-type": wire.CONTENT_TYPE})


class Owner:
    """What a resource needs of a client."""

    session_id = "s"

    def __init__(self, service: Service) -> None:
        self.connection = Connection("http://s:1", "k", transport=httpx.MockTransport(service), retry_seconds=0.0)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, errors.RequestRefused), (401, errors.AuthenticationError), (413, errors.RequestRefused),
        (422, errors.RequestRefused), (429, errors.Overloaded), (500, errors.ServiceError),
    ],
)  # fmt: skip
def test_a_refused_call_does_not_disturb_the_next(
    status: int, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinkle_client.http.time.sleep", lambda seconds: None)
    service = Service()
    resource = DataResource("Dataset", (), {}, client=Owner(service))
    run = resource._run
    assert run(resource._invoke("echo", {"k": 1})) == {"k": 1}
    service.first = [httpx.Response(status, json={"detail": "no"})]
    with pytest.raises(error):
        run(resource._invoke("echo", {"k": 2}))
    assert run(resource._invoke("echo", {"k": 3})) == {"k": 3}
    with pytest.raises(ArgumentError, match="k must be"):
        run(resource._invoke("fail", {"k": 0}))
    assert run(resource._invoke("echo", {"k": 4})) == {"k": 4}
    calls = [wire.unpack(call)["kwargs"]["k"] for call in service.calls]
    assert calls == ([1, 2, 3, 0, 4] if status in (429, 500) else [1, 3, 0, 4]), "unknown ones are made again first"
