"""Probes answer everybody; figures and status answer this machine and operators."""

from typing import Any

import pytest
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from fastapi.testclient import TestClient

from twinkle_server.errors import ServiceError
from twinkle_server.telemetry.health import INSIDE, PROBES, Access, folder_token, health_routes
from twinkle_server.telemetry.metrics import Metrics
from twinkle_server.telemetry.status import FOLDER_TOKEN
from twinkle_server.tenancy.auth import Authentication, Caller

HERE, ELSEWHERE = ("127.0.0.1", 1), ("192.0.2.7", 1)


class Keys:
    """Knows two."""

    async def find(self, key: str) -> Caller | None:
        known = {"tml-root": Caller("ops", "1", "operator"), "tml-user": Caller("alice", "2")}
        return known.get(key)


def client(where: tuple[str, int], ready: bool = True, **access: Any) -> TestClient:
    """Return a client at an address; `access` are fields of `Access`."""
    app = FastAPI(default_response_class=Response)

    async def status() -> dict[str, Any]:
        return {"queues": 3}

    app.include_router(
        health_routes(lambda: (ready, {"engine": "up"}), status, Metrics(b"s"), Access(**{"keys": Keys(), **access}))
    )

    @app.exception_handler(ServiceError)
    async def told(request: Any, error: ServiceError) -> JSONResponse:
        return JSONResponse({"detail": error.message}, error.status)

    app.add_middleware(Authentication, keys=Keys(), open_paths=PROBES | INSIDE)
    return TestClient(app, client=where)


@pytest.mark.parametrize("where", [HERE, ELSEWHERE])
def test_probes_need_no_key(where: tuple[str, int]) -> None:
    asking = client(where)
    for path in ("/healthz", "/api/v1/healthz"):
        answer = asking.get(path)
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    assert asking.get("/readyz").json() == {"status": "ready", "engine": "up"}


def test_not_ready_is_503_while_alive_is_200() -> None:
    asking = client(HERE, ready=False)
    assert asking.get("/readyz").status_code == 503
    assert asking.get("/healthz").status_code == 200


FORWARDED = [
    {"X-Forwarded-For": "192.0.2.7"},
    {"Forwarded": "for=192.0.2.7"},
    {"Via": "1.1 proxy"},
    {"X-Real-IP": "192.0.2.7"},
    {"X-Forwarded-Proto": "https"},
    {"CF-Connecting-IP": "192.0.2.7"},
]


@pytest.mark.parametrize("path", sorted(INSIDE))
@pytest.mark.parametrize(
    ("where", "headers", "status"),
    [
        (HERE, {}, 401),  # as a proxy on this machine looks that adds no header
        (("::1", 1), {}, 401),
        (HERE, {"X-API-Key": "tml-root"}, 200),
        (HERE, {"X-API-Key": "tml-user"}, 403),
        (ELSEWHERE, {}, 401),
        (ELSEWHERE, {"X-API-Key": "tml-nobody"}, 401),
        (ELSEWHERE, {"X-API-Key": "tml-user"}, 403),
        (ELSEWHERE, {"X-API-Key": "tml-root"}, 200),
        (HERE, {FOLDER_TOKEN: "guessed"}, 401),
        (HERE, {FOLDER_TOKEN: folder_token(b"s" * 32)}, 200),
        *((HERE, headers, 401) for headers in FORWARDED),
    ],
)
def test_figures_and_status_are_for_operators_and_who_can_read_the_folder(
    path: str, where: tuple[str, int], headers: dict[str, str], status: int
) -> None:
    assert client(where, token=folder_token(b"s" * 32)).get(path, headers=headers).status_code == status


@pytest.mark.sample(2)
@pytest.mark.parametrize("path", sorted(INSIDE))
@pytest.mark.parametrize(
    ("where", "headers", "status"),
    [
        (HERE, {}, 200),
        (("::1", 1), {}, 200),
        (ELSEWHERE, {}, 401),
        (ELSEWHERE, {"X-API-Key": "tml-root"}, 200),
        (("testclient", 1), {}, 401),
        *((HERE, headers, 401) for headers in FORWARDED),
    ],
)
def test_they_are_for_programs_on_this_machine_where_that_is_allowed(
    path: str, where: tuple[str, int], headers: dict[str, str], status: int
) -> None:
    assert client(where, local=True).get(path, headers=headers).status_code == status


@pytest.mark.sample(2)
@pytest.mark.parametrize("path", sorted(INSIDE))
@pytest.mark.parametrize(
    ("headers", "status"),
    [({}, 200), ({"Host": "evil.example"}, 403), ({"Origin": "https://evil.example"}, 403),
     *((headers, 403) for headers in FORWARDED)],
)  # fmt: skip
def test_without_keys_they_are_for_this_machine_alone(path: str, headers: dict[str, str], status: int) -> None:
    asking = client(HERE, keys=None)
    assert asking.get(path, headers={"Host": "localhost", **headers}).status_code == status
