"""Who asks is known before the body is read, and nothing is answered to strangers."""

import asyncio
from typing import Any

import orjson
import pytest
from fastapi import Depends, FastAPI
from fastapi.testclient import TestClient

from twinkle_server.errors import ServiceError
from twinkle_server.tenancy.auth import CURRENT, LOCAL, Authentication, Caller, caller_of, identify, operator

KEYS = {"tml-alice": Caller("alice", "1"), "tml-root": Caller("ops", "2", "operator")}


class Keys:
    """Knows two."""

    async def find(self, key: str) -> Caller | None:
        return KEYS.get(key)


def make(keys: Keys | None) -> FastAPI:
    """Return an application with one route for everybody and one for operators."""
    app = FastAPI()

    @app.get("/who")
    async def who(asking: Caller = Depends(caller_of)) -> list[str]:  # noqa: B008
        current = CURRENT.get()
        assert current is not None
        return [asking.tenant, current.tenant]

    @app.get("/ops")
    async def ops(asking: Caller = Depends(operator)) -> str:  # noqa: B008
        return asking.tenant

    @app.get("/healthz")
    async def healthz() -> str:
        return "ok"

    @app.exception_handler(ServiceError)
    async def told(request: Any, error: ServiceError) -> Any:
        from fastapi.responses import JSONResponse

        return JSONResponse({"detail": error.message}, error.status)

    app.add_middleware(Authentication, keys=keys, open_paths=frozenset({"/healthz"}))
    return app


@pytest.mark.parametrize("key", [None, "", "tml-bob", "eyJhbGci", "é"])
def test_strangers_get_401_in_words_on_every_route_even_one_that_is_not_there(key: str | None) -> None:
    with TestClient(make(Keys())) as client:
        for path in ("/who", "/ops", "/none", "/"):
            answer = client.get(path, headers={} if key is None else {"X-API-Key": key.encode()})
            assert answer.status_code == 401
            assert "X-API-Key" in answer.json()["detail"]
            assert key is None or not key or key not in answer.text
        assert client.get("/healthz").status_code == 200


def test_a_key_speaks_for_its_tenant_and_roles_hold() -> None:
    with TestClient(make(Keys())) as client:
        assert client.get("/who", headers={"x-api-key": "tml-alice"}).json() == ["alice", "alice"]
        assert client.get("/ops", headers={"x-api-key": "tml-alice"}).status_code == 403
        assert client.get("/ops", headers={"x-api-key": "tml-root"}).json() == "ops"


def test_without_keys_everybody_is_local() -> None:
    for place in ("http://127.0.0.1:8000", "http://localhost", "http://[::1]:8000"):
        with TestClient(make(None), base_url=place) as client:
            assert client.get("/who").json() == ["local", "local"]
            assert client.get("/ops", headers={"x-api-key": "anything"}).json() == "local"
            assert client.get("/who", headers={"origin": place}).status_code == 200
    assert asyncio.run(identify("anything", None)) == LOCAL


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "127.0.0.1.evil.example:8000"},
        {"host": "[::2]:8000"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
    ],
)
def test_without_keys_no_web_page_is_answered(headers: dict[str, str]) -> None:
    with TestClient(make(None), base_url="http://127.0.0.1:8000") as client:
        answer = client.get("/who", headers=headers)
        assert answer.status_code == 403
        assert "without keys" in answer.json()["detail"]
    with TestClient(make(Keys())) as client:
        assert client.get("/who", headers={**headers, "x-api-key": "tml-alice"}).status_code == 200


def test_a_strangers_body_is_not_read() -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        raise AssertionError("nobody reads it")

    async def send(message: Any) -> None:
        sent.append(message)

    async def never(*args: Any) -> None:
        raise AssertionError("nobody is asked")

    scope = {"type": "http", "path": "/who", "headers": [(b"x-api-key", b"tml-bob")]}
    asyncio.run(Authentication(never, Keys())(scope, receive, send))
    assert sent[0]["status"] == 401
    assert orjson.loads(sent[1]["body"])["detail"]


def test_without_the_middleware_nobody_is_let_in() -> None:
    app = FastAPI()
    app.get("/who")(lambda asking=Depends(caller_of): asking.tenant)  # noqa: B008

    with TestClient(app) as client, pytest.raises(ServiceError):
        client.get("/who")
