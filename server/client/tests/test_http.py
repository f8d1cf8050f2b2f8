"""The connection: what is repeated, what is not, and which errors scripts get."""

import asyncio
import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that only pauses and attempts move."""
    now = [100.0]
    monkeypatch.setattr("twinkle_client.http.time.monotonic", lambda: now[0])
    monkeypatch.setattr("twinkle_client.http.time.sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return now


def test_the_whole_time_is_used_and_the_message_has_what_was_waited(clock: list[float]) -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        clock[0] += 0.1
        raise httpx.ConnectError("refused")

    connection = connect(refuse, retry_seconds=20.0)
    with pytest.raises(
        errors.ConnectionFailed, match=r"GET /twinkle/thing for (\d+\.\d) s \(8 attempts; .*refused"
    ) as lost:
        connection.run(connection.request("GET", "/thing"))
    assert clock[0] == pytest.approx(120.1, abs=0.05)
    assert f"for {clock[0] - 100:.1f} s" in str(lost.value)


def test_long_waits_are_logged_now_and_then(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    script = Script(*[httpx.ConnectError("refused")] * 8, *[detail(503, "loads", **{"retry-after": "9"})] * 9,
                    httpx.Response(200, json=1))  # fmt: skip
    connection = connect(script)
    with caplog.at_level("WARNING", "twinkle_client.http"):
        assert connection.run(connection.request("GET", "/thing", query={"secret": 1})) == 1
    lines = [record.getMessage() for record in caplog.records]
    first = "no result of GET /twinkle/thing for 6 s (ConnectError: refused); trying until 300 s have passed"
    assert lines[0] == first
    assert "HTTP status 503: loads" in lines[-1]
    assert len(lines) == 1 + int((clock[0] - 106) // 30)
    assert "secret" not in "".join(lines)


def certificate(folder: Path, name: str) -> Path:
    """Write a certificate for a name that nobody trusts, with its key."""
    key, called = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(called)
        .issuer_name(called)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    file = folder / "both.pem"
    file.write_bytes(key.private_bytes(*form) + made.public_bytes(serialization.Encoding.PEM))
    return file


@pytest.fixture
def accepted() -> list[socket.socket]:
    """Connections of `listening`."""
    return []


@contextlib.contextmanager
def listening(file: Path | None, accepted: list[socket.socket]) -> Iterator[int]:
    """Accept connections, with TLS if there is a certificate; the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if file is not None:
            context.load_cert_chain(file)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    plain, _ = listener.accept()
                    accepted.append(plain)
                    with contextlib.suppress(OSError), plain:
                        if file is None:
                            plain.recv(4096)
                            plain.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
                        else:
                            context.wrap_socket(plain, server_side=True).close()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)


@pytest.mark.parametrize(
    ("trusted", "encrypted", "words"),
    [
        (False, True, "its certificate is not accepted: self-signed certificate; .*set SSL_CERT_FILE"),
        (True, True, "its certificate is not accepted: .*127.0.0.1.*; .*check the address"),
        (False, False, "the TLS handshake failed: .*; check that the address has the right port"),
    ],
    ids=["untrusted", "another name", "no TLS"],
)
def test_failures_of_tls_are_final(
    trusted: bool, encrypted: bool, words: str, tmp_path: Path, accepted: list[socket.socket],
    monkeypatch: pytest.MonkeyPatch, no_pauses: list[float],
) -> None:  # fmt: skip
    file = certificate(tmp_path, "other.example")
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(file))
    with listening(file if encrypted else None, accepted) as port:
        connection = Connection(f"https://127.0.0.1:{port}", "tml-key")
        where = rf"cannot connect to https://127.0.0.1:{port}: {words}"
        with pytest.raises(errors.ConnectionFailed, match=where):
            connection.run(connection.request("POST", "/thing", {"a": 1}))
        with pytest.raises(errors.ConnectionFailed, match=where):
            next(connection.events("/thing", {}))

        async def story() -> None:
            with pytest.raises(errors.ConnectionFailed, match=where):
                await connection.run_async(connection.request("POST", "/thing"))
            await connection.close_async()

        asyncio.run(story())
        connection.close()
    assert len(accepted) == 3, "one attempt each"
    assert no_pauses == []


def test_a_connection_that_ends_during_the_handshake_is_repeated(no_pauses: list[float]) -> None:
    ended = httpx.ConnectError("EOF occurred in violation of protocol")
    ended.__cause__ = ssl.SSLEOFError(8, "EOF occurred in violation of protocol")
    connection = connect(Script(ended, httpx.Response(200, json=1)))
    assert connection.run(connection.request("GET", "/thing")) == 1
    assert len(no_pauses) == 1


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
