"""Sessions of the dashboard by themselves: their end, services without keys, and who may read texts."""

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from starlette.requests import Request
from starlette.responses import Response
from starlette.testclient import TestClient

from twinkle_server.application import assemble
from twinkle_server.dashboard.login import Logins, Visitor
from twinkle_server.dashboard.pages import Dashboard, form_of
from twinkle_server.engine.messages import Message
from twinkle_server.errors import BadRequest, Forbidden, Unauthorized
from twinkle_server.runtime.service import Service
from twinkle_server.settings import Rollouts, Settings
from twinkle_server.store import open_store
from twinkle_server.store.records import Model, Session
from twinkle_server.store.tables import rollouts
from twinkle_server.telemetry.metrics import Metrics
from twinkle_server.tenancy.auth import LOCAL, Caller
from twinkle_server.tenancy.keys import issue, lookup, revoke

ANA = Caller("ana", "1")


class Keys:
    """Knows ana, until her key is revoked."""

    revoked = False

    async def find(self, key: str) -> Caller | None:
        return ANA if key == "tml-ana" and not self.revoked else None

    async def holder(self, prefix: str) -> Caller | None:
        return ANA if prefix == lookup("tml-ana") and not self.revoked else None


def request(cookie: str = "", **headers: str) -> Request:
    found = {"host": "127.0.0.1", "cookie": cookie, **headers}
    pairs = [(name.encode(), value.encode()) for name, value in found.items()]
    return Request(
        {"type": "http", "method": "GET", "path": "/", "scheme": "http", "query_string": b"", "headers": pairs}
    )


def test_a_form_with_another_field_is_refused() -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"csrf=1&keyy=tml-ana", "more_body": False}

    with pytest.raises(BadRequest, match="the form has the fields csrf, key, got keyy"):
        asyncio.run(form_of(Request(request().scope, receive), "csrf", "key"))


def cookie_of(logins: Logins, key: str = "tml-ana") -> str:
    response = Response()
    asyncio.run(logins.open(request(), key, response))
    return response.headers["set-cookie"].partition(";")[0]


def test_a_session_ends_with_time_and_with_its_key() -> None:
    keys = Keys()
    logins = Logins(keys, b"s" * 32, "i" * 32, seconds=60)
    cookie = cookie_of(logins)
    visitor = asyncio.run(logins.visitor(request(cookie)))
    assert (visitor.caller, visitor.tenant) == (ANA, "ana")
    keys.revoked = True
    with pytest.raises(Unauthorized, match="revoked"):
        asyncio.run(logins.visitor(request(cookie)))
    with pytest.raises(Unauthorized, match="expired"):
        asyncio.run(Logins(Keys(), b"s" * 32, "i" * 32, -1).visitor(request(cookie_of(logins_that_end()))))


def logins_that_end() -> Logins:
    return Logins(Keys(), b"s" * 32, "i" * 32, seconds=-1)


def test_a_cookie_of_another_service_is_none_of_ours() -> None:
    cookie = cookie_of(Logins(Keys(), b"s" * 32, "i" * 32, 60))
    for other in (Logins(Keys(), b"t" * 32, "i" * 32, 60), Logins(Keys(), b"s" * 32, "j" * 32, 60)):
        with pytest.raises(Unauthorized):
            asyncio.run(other.visitor(request(cookie)))


def test_tokens_of_forms_differ_by_session() -> None:
    logins = Logins(Keys(), b"s" * 32, "i" * 32, 60)
    first, second = (asyncio.run(logins.visitor(request(cookie_of(logins)))) for _ in range(2))
    assert first.csrf != second.csrf
    logins.check(first, first.csrf)
    with pytest.raises(Forbidden):
        logins.check(first, second.csrf)


def test_without_keys_only_this_machine_is_let_in() -> None:
    logins = Logins(None, b"s" * 32, "i" * 32, 60)
    assert asyncio.run(logins.visitor(request())).caller == LOCAL
    foreign: list[dict[str, Any]] = [{"host": "evil.example"}, {"origin": "https://evil.example"}]
    for headers in foreign:
        with pytest.raises(Forbidden):
            asyncio.run(logins.visitor(request(**headers)))


def test_texts_are_for_their_tenant_and_for_operators_if_allowed(tmp_path: Path) -> None:
    run = Model("s:train:0", "ana", "s", 0, "base", 8, 1.0, 1.0)
    operator, eve = Caller("ops", "2", "operator"), Caller("eve", "3")
    with closing(open_store(tmp_path)) as store:
        for allowed in (False, True):
            settings = Settings("m", tmp_path, rollouts=Rollouts(operator=allowed))
            pages = Dashboard(None, store, settings, None, None)  # type: ignore[arg-type]
            readable = [pages._readable(Visitor(caller, ""), run) for caller in (ANA, eve, operator)]
            assert readable == [True, False, allowed]


@pytest.mark.parametrize("dashboard", [True, False])
def test_a_service_without_dashboard_has_no_pages(tmp_path: Path, dashboard: bool) -> None:
    settings = Settings("m", tmp_path, dashboard=dashboard)
    metrics = Metrics(b"s")
    with closing(open_store(tmp_path)) as store:
        client = TestClient(assemble(settings, store, Service(settings, store, metrics), metrics))
        found = [
            client.get(path, follow_redirects=False).status_code for path in ("/", "/ui/login", "/ui/static/app.js")
        ]
    assert found == ([303, 200, 200] if dashboard else [401, 401, 401])


def test_rollouts_that_shall_not_be_kept_are_not_written(tmp_path: Path) -> None:
    def message(tenant: str, session: str) -> Message:
        head = {"queue_id": f"{session}:train:0", "tenant": tenant, "number": 1, "rows": [{"n": 2}]}
        return Message("rollouts", head, bytes(36))

    async def kept(store: Any, rows: int, tenant: str = "ana", session: str = "s") -> int:
        service = Service(Settings("m", tmp_path, rollouts=Rollouts(rows=rows)), store)
        service.record_rollouts(message(tenant, session))
        await service._rollouts.flush()
        return len(await store.database.read(lambda connection: connection.execute(select(rollouts)).all()))

    async def story(store: Any) -> None:
        await store.sessions.create(Session("s", "ana", 1.0, 1.0))
        await store.sessions.create(Session("quiet", "ana", 1.0, 1.0, metadata={"record_rollouts": "False"}))
        for name, limit in (("bob", 0), ("cy", 1), ("ana", 9)):
            await issue(store, name, quotas={"rollouts": limit})
        await issue(store, "second", tenant="bob")
        assert await kept(store, 0) == 0
        assert await kept(store, 2, session="quiet") == 0
        assert await kept(store, 2, "bob", "b") == 0
        await revoke(store, "bob")
        assert await kept(store, 2, "bob", "b") == 1  # the operator has left the tenant a key without a limit
        await revoke(store, "second")
        assert await kept(store, 2, "bob", "b") == 1
        assert [await kept(store, 2, "cy", "c") for _ in range(2)] == [2, 2]
        assert [await kept(store, 2) for _ in range(3)] == [3, 4, 4]

    with closing(open_store(tmp_path)) as store:
        asyncio.run(story(store))
