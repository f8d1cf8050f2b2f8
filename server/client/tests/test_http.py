"""The connection: what is repeated, what is not, and which errors scripts get."""

import asyncio
import json
from collections.abc import Callable

import httpx
import pytest

from twinkle.errors import ArgumentError
from twinkle_client import calls, errors, wire
from twinkle_client.http import Connection

Handler = Callable[[httpx.Request], httpx.Response]


class Script:
    """A service that gives the scripted answers one after another, and keeps the requests."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self.answers, self.requests = list(answers), []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def connect(script: Handler, **options: float) -> Connection:
    transport = httpx.MockTransport(script)
    return Connection("http://service:1", "tml-key", transport=transport, async_transport=transport, **options)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    pauses: list[float] = []
    monkeypatch.setattr("twinkle_client.http.time.sleep", pauses.append)
    return pauses


def detail(status: int, text: str, **headers: str) -> httpx.Response:
    return httpx.Response(status, json={"detail": text}, headers=headers)


def test_a_request_is_repeated_with_the_same_id_until_it_is_answered(no_pauses: list[float]) -> None:
    script = Script(
        httpx.ConnectError("refused"),
        httpx.ReadError("reset"),
        detail(503, "starting", **{"retry-after": "3"}),
        httpx.Response(200, json={"x": 1}),
    )
    connection = connect(script)
    assert connection.run(connection.request("POST", "/thing", {"a": 1})) == {"x": 1}
    assert len({request.headers["x-request-id"] for request in script.requests}) == 1
    assert len({request.content for request in script.requests}) == 1
    assert no_pauses[2] == 3.0
    assert no_pauses[0] < no_pauses[1]


def test_bodies_are_frames_and_answers_are_read_by_their_type() -> None:
    script = Script(
        httpx.Response(200, content=wire.pack({"x": [1]}), headers={"content-type": wire.CONTENT_TYPE}),
        httpx.Response(200, content=b"raw", headers={"content-type": "application/octet-stream"}),
    )
    connection = connect(script)
    assert connection.run(connection.request("POST", "/a", {"rows": [1, 2]})) == {"x": [1]}
    assert connection.run(connection.request("GET", "/b", query={"limit": 3, "all": True, "no": None})) == b"raw"
    first, second = script.requests
    assert (first.url.path, first.headers["x-api-key"]) == ("/twinkle/a", "tml-key")
    assert wire.unpack(first.content) == {"rows": [1, 2]}
    assert second.url.query == b"limit=3&all=true"
    assert "content-type" not in second.headers


@pytest.mark.parametrize(
    ("status", "error", "builtin"),
    [
        (400, errors.RequestRefused, ValueError),
        (401, errors.AuthenticationError, PermissionError),
        (404, errors.NotFound, LookupError),
        (409, errors.Conflict, RuntimeError),
        (410, errors.Gone, LookupError),
        (413, errors.RequestRefused, ValueError),
    ],
)
def test_refusals_are_typed_and_not_repeated(status: int, error: type[Exception], builtin: type[Exception]) -> None:
    script = Script(detail(status, "rank must be at least 1, got 0"))
    connection = connect(script)
    with pytest.raises(error, match="rank must be at least 1, got 0") as caught:
        connection.run(connection.request("POST", "/thing"))
    assert isinstance(caught.value, builtin)
    assert isinstance(caught.value, errors.TwinkleClientError)
    assert (caught.value.status, len(script.requests)) == (status, 1)


def test_a_failing_service_is_asked_a_few_times() -> None:
    script = Script(*[detail(500, "internal error")] * 9)
    connection = connect(script)
    with pytest.raises(errors.ServiceError, match="internal error"):
        connection.run(connection.request("GET", "/thing"))
    assert len(script.requests) == 3


def test_an_overloaded_service_is_given_up_after_the_time_of_the_connection() -> None:
    script = Script(*[detail(429, "too many requests")] * 9)
    connection = connect(script, retry_seconds=0.0)
    with pytest.raises(errors.Overloaded, match="too many requests"):
        connection.run(connection.request("GET", "/thing"))


def test_a_service_that_is_not_there() -> None:
    connection = connect(Script(httpx.ConnectError("refused")), retry_seconds=0.0)
    with pytest.raises(errors.ConnectionFailed, match=r"no answer to GET /twinkle/thing .*refused"):
        connection.run(connection.request("GET", "/thing", query={"secret": 1}))


def test_asynchronous_calls_are_the_same_calls() -> None:
    script = Script(httpx.Response(200, json=1), httpx.Response(200, json=2), detail(404, "no such thing"))
    connection = connect(script)

    async def both() -> list[int]:
        found = await asyncio.gather(
            connection.run_async(connection.request("GET", "/a")), connection.run_async(connection.request("GET", "/b"))
        )
        with pytest.raises(errors.NotFound):
            await connection.run_async(connection.request("GET", "/c"))
        await connection.close_async()
        return found

    assert asyncio.run(both()) == [1, 2]
    assert asyncio.run(connection.run_async(_constant(3))) == 3  # another loop


def _constant(value: int) -> calls.Call[int]:
    return value
    yield  # a generator


def test_twins_have_the_signature_of_their_method() -> None:
    class Model:
        def __init__(self, connection: Connection) -> None:
            self.run, self.run_async = connection.run, connection.run_async

        def _double(self, number: int, *, again: bool = False) -> calls.Call[int]:
            """Double a number."""
            yield calls.Sleep(0)
            return number * (4 if again else 2)

        double, double_async = calls.twins(_double)

    model = Model(connect(Script()))
    assert model.double(3) == 6
    assert asyncio.run(model.double_async(3, again=True)) == 12
    assert (Model.double.__name__, Model.double_async.__name__) == ("double", "double_async")
    assert Model.double.__doc__ == Model.double_async.__doc__ == "Double a number."
    with pytest.raises(TypeError):
        model.double(3, agian=True)


def test_several_connections_keep_their_own_address_and_key() -> None:
    seen: list[tuple[str, str]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append((str(request.url), request.headers["x-api-key"]))
        return httpx.Response(200, content=json.dumps(None), headers={"content-type": "application/json"})

    transport = httpx.MockTransport(answer)
    first = Connection("http://one:1/api/v1", "a", transport=transport)
    second = Connection("http://two:2/proxy/", "b", transport=transport)
    for connection in (first, second, first):
        connection.run(connection.request("GET", "/x"))
    one, two = ("http://one:1/twinkle/x", "a"), ("http://two:2/proxy/twinkle/x", "b")
    assert seen == [one, two, one]
    assert "tml" not in repr(first)


def test_the_address_and_the_key_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINKLE_SERVER_URL", "http://there:9")
    assert Connection().base_url == "http://there:9"
    with pytest.raises(ArgumentError, match="base_url must be an address"):
        Connection("localhost:8000")
