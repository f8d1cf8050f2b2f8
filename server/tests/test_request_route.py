"""Endpoints that take the request alone are called directly, and answer as FastAPI would."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI, Request, Response

from twinkle_server.application import create_application
from twinkle_server.errors import Busy, SequenceConflict
from twinkle_server.settings import Settings

router = APIRouter()


@router.post("/body")
async def body(request: Request) -> Response:
    """Return what was sent, and by which route."""
    return Response(await request.body() + request.scope["route"].path.encode(), 201, {"X-Of": request.url.path})


@router.post("/busy")
async def busy(request: Request) -> Response:
    """Fail with a header."""
    raise Busy("later", retry_after=7.0)


@router.post("/conflict")
async def conflict(request: Request) -> Response:
    """Fail with another header."""
    raise SequenceConflict(f"again: {len(await request.body())}")


@router.post("/broken")
async def broken(request: Request) -> Response:
    """Fail in a way that nobody foresaw."""
    raise ZeroDivisionError(request.url.path)


@router.get("/things/{name}")
async def thing(request: Request, name: str) -> Response:
    """Need the framework: a part of the path is a parameter."""
    return Response(name + request.method)


SETTINGS = Settings("model", Path("data"))


@pytest.fixture
def application() -> FastAPI:
    """The service's application, with these endpoints in place of its own."""
    return create_application(None, None, SETTINGS, router=router)  # type: ignore[arg-type]


def ask(application: Any, method: str, path: str) -> tuple[int, dict[bytes, bytes], bytes]:
    """Return an answer's status, headers and body."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"sent ", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b"", "server": ("s", 1)}
    asyncio.run(application(scope, receive, send))
    return sent[0]["status"], dict(sent[0]["headers"]), b"".join(message.get("body", b"") for message in sent[1:])


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/body", 201),
        ("POST", "/busy", 429),
        ("POST", "/conflict", 409),
        ("POST", "/broken", 500),
        ("GET", "/things/a", 200),
        ("GET", "/body", 405),
        ("POST", "/body/", 404),
        ("POST", "/nothing", 404),
    ],
)
def test_the_answer_is_that_of_fastapi(application: FastAPI, method: str, path: str, status: int) -> None:
    plain = create_application(None, None, SETTINGS, router=APIRouter())  # type: ignore[arg-type]
    plain.include_router(router)
    answer = ask(application, method, path)
    assert answer[0] == status
    assert answer == ask(plain, method, path)


def test_an_error_after_the_start_of_a_response_closes_the_connection(application: FastAPI) -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ZeroDivisionError

    application.mount("/stream", broken)
    with pytest.raises(ZeroDivisionError):
        ask(application, "GET", "/stream/")


def test_added_middleware_and_error_handlers_are_called(application: FastAPI) -> None:
    seen = []

    class Seeing:
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            seen.append(scope["path"])
            await self.app(scope, receive, send)

    async def handled(request: Request, error: Exception) -> Response:
        return Response(type(error).__name__, 418)

    application.add_middleware(Seeing)
    application.add_exception_handler(ArithmeticError, handled)
    assert ask(application, "POST", "/broken")[::2] == (418, b"ZeroDivisionError")
    assert seen == ["/broken"]


def test_no_dependency_is_solved_for_the_request_alone(application: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    solved = []

    async def solve(*, request: Request, **_: Any) -> Any:
        solved.append(request.url.path)
        raise Busy("solved")

    monkeypatch.setattr("fastapi.routing.solve_dependencies", solve)
    assert ask(application, "POST", "/body")[0] == 201
    assert ask(application, "GET", "/things/a")[0] == 429
    assert solved == ["/things/a"]
