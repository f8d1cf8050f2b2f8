"""What changed something of lasting value has a row: who, what, which; nothing else has."""

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from twinkle_server.application import create_application
from twinkle_server.checkpoints.merge_routes import merge_routes
from twinkle_server.dashboard.pages import Dashboard
from twinkle_server.errors import Unavailable
from twinkle_server.settings import Settings
from twinkle_server.store import open_store
from twinkle_server.store.records import AuditEntry
from twinkle_server.tenancy.auth import EVENTS, AuditMiddleware, Caller

ALICE = Caller("alice", "key-1")


class Table:
    """Keeps entries."""

    def __init__(self, fails: bool = False) -> None:
        self.entries: list[AuditEntry] = []
        self.fails = fails

    async def record(self, entry: AuditEntry) -> None:
        if self.fails:
            raise Unavailable("full")
        self.entries.append(entry)


def ask(table: Table, method: str, template: str, status: int = 200, caller: Any = ALICE, **params: str) -> list[Any]:
    """Send a request through the middleware; return what was sent."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["route"] = type("Route", (), {"path": template})()
        scope["path_params"] = params
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "caller": caller, "request_id": "r1"}
    asyncio.run(AuditMiddleware(app, table)(scope, None, send))  # type: ignore[arg-type]
    return sent


def test_a_change_is_written_with_who_and_which() -> None:
    table = Table()
    ask(table, "DELETE", "/training_runs/{run}/checkpoints/{kind}/{name}", run="m", kind="weights", name="a")
    (entry,) = table.entries
    assert (entry.tenant, entry.event) == ("alice", "checkpoint.delete")
    assert entry.details == {"key": "key-1", "request": "r1", "run": "m", "kind": "weights", "name": "a"}


@pytest.mark.parametrize(
    ("method", "template", "status"),
    [
        ("POST", "/create_session", 403),
        ("POST", "/create_session", 503),
        ("POST", "/forward_backward", 200),
        ("POST", "/session_heartbeat", 200),
        ("GET", "/sessions/{session_id}", 200),
    ],
)
def test_refusals_reading_and_training_are_not(method: str, template: str, status: int) -> None:
    table = Table()
    ask(table, method, template, status)
    assert not table.entries


def test_strangers_have_no_rows() -> None:
    table = Table()
    ask(table, "POST", "/create_session", caller=None)
    assert not table.entries


def test_an_answer_does_not_depend_on_the_row() -> None:
    assert [message["type"] for message in ask(Table(fails=True), "POST", "/create_session")] == [
        "http.response.start",
        "http.response.body",
    ]


def test_every_event_is_one_of_a_route_that_is_there(tmp_path: Path) -> None:
    settings = Settings("m", tmp_path)
    application = create_application(None, None, settings)  # type: ignore[arg-type]
    there = set()
    for path, operations in application.openapi()["paths"].items():
        last = path.rpartition("/")[2]
        there |= {(method.upper(), "{checkpoint}" if last.startswith("{") else last) for method in operations}
    with closing(open_store(tmp_path)) as store:
        for route in Dashboard(None, store, settings, None, None).router().routes:  # type: ignore[arg-type]
            there |= {(method, route.path.rpartition("/")[2]) for method in route.methods}  # type: ignore[attr-defined]
    for route in merge_routes(None).routes:  # type: ignore[arg-type]
        there |= {(method, route.path.rpartition("/")[2]) for method in route.methods}  # type: ignore[attr-defined]
    assert set(EVENTS) <= there
