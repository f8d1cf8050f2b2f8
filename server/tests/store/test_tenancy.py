"""Another tenant's rows are not there, for every method; and no query of a tenant's table leaves the tenant out."""

import ast
import asyncio
import inspect
import re
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from twinkle_server.errors import Gone, NotFound
from twinkle_server.operations import Outcome, Submission
from twinkle_server.settings import Limits
from twinkle_server.store import Store, checkpoints, figures, models, samplers, sessions, statements, tenants, views
from twinkle_server.store.figures import Kept
from twinkle_server.store.records import AuditEntry, Checkpoint, Key, Model, Sampler, Session, Usage
from twinkle_server.store.sessions import SessionSearch
from twinkle_server.store.tables import TENANTS_TABLES, metadata

Run = Callable[[Awaitable[Any]], Any]
MODULES = (sessions, models, samplers, checkpoints, tenants, figures, views)
EVERYBODYS = {"meta", "lease", "tenants", "compositions", "payloads", "results", "folders"}
"""Tables without a tenant: of the whole directory, or keyed by an operation that has one."""
OF_LANES = {
    "NEXT_NUMBER",
    "PENDING",
    "AFTER",
    "FINISH",
    "OUTCOME",
    "BLAME",
    "GET_PAYLOAD",
    "FORGET_PAYLOAD",
}
OF_LANES |= {"SNAPSHOT", "SET_SNAPSHOT", "COVERED", "MARK_READ", "UNREAD", "READ", "FORGET_RESULT", "OVER", "OLD"}
OF_LANES |= {"OLD_CHECKPOINTS", "OLD_SAMPLERS", "ROWS", "PAYLOAD_FILES", "RESULT_FILES", "FOLDERS", "SOURCES"}
OF_LANES |= {"OLD_RECORDED"}
"""Statements of the runtime, over queues and rows that it knows; no client's text reaches them unchecked."""
CHECKED_BY_CALLERS = {"create", "_at", "_exists", "_after_cursor", "_has_metadata"}
"""Conditions that are added to a query which has its tenant; and a new key, whose name nobody else's may have."""


def functions(source: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return a module's functions and methods; what is inside one belongs to it."""
    scopes: list[ast.Module | ast.ClassDef] = [ast.parse(source)]
    for scope in scopes:
        for node in scope.body:
            if isinstance(node, ast.ClassDef):
                scopes.append(node)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node


def unscoped(source: str) -> list[str]:
    """Return names of functions that query a tenant's table, leave the tenant out, and do not say so."""
    names = "|".join(table.name for table in TENANTS_TABLES)
    found = []
    for function in functions(source):
        text = ast.unparse(function)
        queried = set(re.findall(rf"\b(?:select|update|delete)\((?:func\.\w+\(.*?)?({names})\b", text))
        queried |= set(re.findall(rf"\b({names})\.c\.", text)) if "func.count()" in text else set()
        across = (ast.get_docstring(function) or "").startswith("Across tenants")
        named = all(f"{name}.c.tenant ==" in text for name in queried) or "_conditions(tenant" in text
        if not (named or across or function.name in CHECKED_BY_CALLERS):
            found.append(function.name)
    return found


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_every_query_of_a_tenants_table_names_the_tenant(module: ModuleType) -> None:
    assert unscoped(inspect.getsource(module)) == []


@pytest.mark.parametrize(
    "query",
    [
        "select(models).where(models.c.id == model)",
        "update(samplers).where(samplers.c.id == sampler)",
        "delete(audit)",
        "select(func.sum(checkpoints.c.size))",
        "select(func.count()).where(models.c.status == 'live')",
        "select(models).where(checkpoints.c.tenant == tenant)",
    ],
)
def test_a_query_without_the_tenant_would_be_noticed(query: str) -> None:
    assert unscoped(f"class A:\n    def get(self, tenant):\n        return {query}") == ["get"]
    assert unscoped(f"class A:\n    def get(self):\n        'Across tenants: all.'\n        return {query}") == []


def test_every_statement_of_the_journal_names_the_tenant_or_is_the_runtimes_own() -> None:
    tenants = {table.name for table in TENANTS_TABLES}
    for name, text in vars(statements).items():
        if not name.isupper() or name == "COLUMNS" or name in OF_LANES:
            continue
        touched = {table for table in tenants if f" {table}" in text}
        assert not touched or "tenant = ?" in text or text.lstrip().startswith("INSERT"), name
    assert set(vars(statements)) >= OF_LANES


def test_every_table_has_a_tenant_or_belongs_to_nobody() -> None:
    assert {table.name for table in TENANTS_TABLES} == set(metadata.tables) - EVERYBODYS
    assert all("tenant" in table.c for table in TENANTS_TABLES)


@pytest.fixture
def ada(store: Store, run: Run) -> Store:
    """A store in which ada has one of everything."""
    run(store.sessions.create(Session("s", "ada", 1.0, 1.0)))
    model = Model("s:train:0", "ada", "s", 0, "base", 8, 1.0, 1.0)
    run(
        store.journal.submit(
            Submission("ada", model.id, "create", b"{}", 0), lambda connection: models.add(connection, model)
        )
    )
    run(store.samplers.create(Sampler("s:sample:0", "ada", "s", 0, "base", 1.0, inflight=model.id)))
    run(store.checkpoints.create(Checkpoint("ada", model.id, "weights", "c", "checkpoints/c", 1, "d", "base", 8, 1.0)))
    run(store.keys.create(Key("k", "ada", "k", "user", "p", "h", 1.0)))
    run(store.audit.record(AuditEntry(1.0, "ada", "login")))
    run(store.usage.add(Usage("ada", "2026-01-01", "training", 1)))
    for number, kind in ((1, "forward_backward"), (2, "optim_step"), (3, "optim_step")):
        submission = Submission("ada", model.id, kind, b"{}", number)
        _, operation = run(store.journal.submit(submission))
        run(store.journal.finish([Outcome(operation.id, b"{}", figures='{"loss":1.0,"tokens":2}')]))
        run(store.figures.fold() if number == 2 else asyncio.sleep(0))
    run(store.journal.submit(Submission("ada", model.id, "save", b"{}", 4, refusal="no")))
    run(store.rollouts.add([Kept("ada", model.id, 1, 1.0, {}, b"")], {model.id: 9}))
    return store


PATH = Checkpoint("ada", "s:train:0", "weights", "c", "", 1, "d", "base", 8, 1.0).path
ASKED: dict[str, Callable[[Store], Awaitable[Any]]] = {
    "sessions.get": lambda store: store.sessions.get("eve", "s"),
    "sessions.heartbeat": lambda store: store.sessions.heartbeat("eve", "s", 2.0),
    "sessions.end": lambda store: store.sessions.end("eve", "s", "finished", 2.0),
    "sessions.set_project": lambda store: store.sessions.set_project("eve", "s", "p"),
    "models.get": lambda store: store.models.get("eve", "s:train:0"),
    "models.set_status": lambda store: store.models.set_status("eve", "s:train:0", "gone", 2.0),
    "models.gone": lambda store: store.models.gone("eve", "s:train:0", 2.0, "unload"),
    "samplers.create": lambda store: store.samplers.create(Sampler("s:sample:9", "eve", "s", 9, "base", 1.0)),
    "samplers.get": lambda store: store.samplers.get("eve", "s:sample:0"),
    "samplers.join": lambda store: store.samplers.join("eve", "s:sample:0"),
    "samplers.end": lambda store: store.samplers.end("eve", "s:sample:0", 2.0),
    "checkpoints.get": lambda store: store.checkpoints.get("eve", PATH, 2.0),
    "checkpoints.find": lambda store: store.checkpoints.find("eve", PATH, 2.0),
    "checkpoints.delete": lambda store: store.checkpoints.delete("eve", PATH, 2.0),
    "checkpoints.set_expiry": lambda store: store.checkpoints.set_expiry("eve", PATH, 2.0, 3.0),
    "checkpoints.publish": lambda store: store.checkpoints.publish("eve", PATH, 2.0, True),
    "rollouts.get": lambda store: store.rollouts.get("eve", "s:train:0", 1),
    "views.model": lambda store: store.views.model("eve", "s:train:0"),
    "journal.submit": lambda store: store.journal.submit(Submission("eve", "s:train:0", "create", b"{}", 0)),
}
EMPTY: dict[str, Callable[[Store], Awaitable[Any]]] = {
    "sessions.heard": lambda store: store.sessions.heard([("eve", "s", 2.0)]),
    "sessions.page": lambda store: store.sessions.page("eve", 10, 0),
    "sessions.search": lambda store: store.sessions.search("eve", SessionSearch(session="s")),
    "models.page": lambda store: store.models.page("eve", 10, 0),
    "models.of_session": lambda store: store.models.of_session("eve", "s"),
    "models.count": lambda store: store.models.count("eve"),
    "samplers.of_session": lambda store: store.samplers.of_session("eve", "s"),
    "samplers.count": lambda store: store.samplers.count("eve"),
    "checkpoints.page": lambda store: store.checkpoints.page("eve", 2.0, run="s:train:0"),
    "checkpoints.latest": lambda store: store.checkpoints.latest("eve", ["s:train:0"], 2.0),
    "checkpoints.bytes": lambda store: store.checkpoints.bytes("eve", 2.0),
    "checkpoints.of_sessions": lambda store: store.checkpoints.of_sessions("eve", ["s"], 2.0),
    "checkpoints.surplus": lambda store: store.checkpoints.surplus("eve", "s:train:0", "weights", 0, 2.0),
    "audit.entries": lambda store: store.audit.entries("eve"),
    "figures.steps": lambda store: store.figures.steps("eve", "s:train:0"),
    "rollouts.of_run": lambda store: store.rollouts.of_run("eve", "s:train:0", 9),
    "rollouts.remove": lambda store: store.rollouts.remove("eve", "s:train:0"),
    "views.models": lambda store: store.views.models("eve", 9),
    "views.checkpoints": lambda store: store.views.checkpoints("eve", 9),
    "views.failures": lambda store: store.views.failures("eve", 9),
    "views.tenants": lambda store: store.views.tenants("eve"),
    "usage.between": lambda store: store.usage.between("eve", "2026", "2027"),
}
FREE = {"sessions.create", "checkpoints.create", "keys.create", "audit.record", "usage.add", "usage.add_all"}
"""They write a row that says itself whose it is."""
ELSEWHERE = {
    "journal.future",
    "journal.finish",
    "journal.pending",
    "journal.after",
    "journal.payload",
    "journal.composition",
}
ELSEWHERE |= {"journal.blame", "journal.snapshotted", "journal.snapshot", "journal.close"}
"""`future` is tested with the journal; the others are the runtime's."""


def contents(store: Store) -> list[str]:
    def dump(connection: Any) -> list[str]:
        return list(connection.connection.dbapi_connection.iterdump())

    return store.database.write_now(dump)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ASKED)
def test_anothers_is_not_found_and_not_changed(ada: Store, run: Run, name: str) -> None:
    before = contents(ada)
    with pytest.raises((NotFound, Gone)) as caught:
        run(ASKED[name](ada))
    assert isinstance(caught.value, Gone) == (name == "sessions.heartbeat")
    assert contents(ada) == before


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", EMPTY)
def test_anothers_is_not_listed_and_not_changed(ada: Store, run: Run, name: str) -> None:
    before = contents(ada)
    found = run(EMPTY[name](ada))
    assert not (found.rows or found.total if hasattr(found, "rows") else found)
    assert contents(ada) == before


def test_functions_for_others_transactions_know_the_tenant_too(ada: Store, run: Run) -> None:
    write = ada.database.write
    assert run(write(lambda connection: samplers.inflight_folder(connection, "eve", "s:train:0"))) is None
    assert (
        run(write(lambda connection: samplers.move_inflight(connection, "eve", "s:train:0", "checkpoints/evil"))) == []
    )
    assert run(ada.samplers.get("ada", "s:sample:0")).folder is None
    for ask in (sessions.check_active, lambda connection, tenant, _: models.get(connection, tenant, "s:train:0")):
        with pytest.raises(NotFound):
            run(write(lambda connection, ask=ask: ask(connection, "eve", "s")))
    with pytest.raises(NotFound):
        run(write(lambda connection: models.add(connection, Model("x", "eve", "s", 9, "base", 8, 1.0, 1.0))))


def test_what_another_does_not_see_is_there(ada: Store, run: Run) -> None:
    assert [step.data for step in run(ada.figures.steps("ada", "s:train:0"))] == [
        {"loss": 2.0, "tokens": 4}, {"loss": 1.0, "tokens": 2},
    ]  # fmt: skip
    assert len(run(ada.rollouts.of_run("ada", "s:train:0", 9))) == 1
    for tenant in ("ada", None):
        assert run(ada.views.model(tenant, "s:train:0")).tenant == "ada"
        assert run(ada.views.models(tenant, 9)).total == run(ada.views.checkpoints(tenant, 9)).total == 1
        assert [failure.error for failure in run(ada.views.failures(tenant, 9))] == ["no"]
        assert [row.tenant for row in run(ada.views.tenants(tenant))] == ["ada"]


def test_no_method_is_forgotten(store: Store) -> None:
    tested = set(ASKED) | set(EMPTY) | FREE | ELSEWHERE
    for field in (
        "sessions",
        "models",
        "samplers",
        "checkpoints",
        "keys",
        "audit",
        "usage",
        "journal",
        "figures",
        "rollouts",
        "views",
    ):
        for name, method in inspect.getmembers(type(getattr(store, field)), inspect.isfunction):
            across = (method.__doc__ or "").startswith("Across tenants")
            assert name.startswith("_") or across or f"{field}.{name}" in tested, f"{field}.{name}"


def test_whose_a_result_is_does_not_depend_on_its_being_there(ada: Store, run: Run) -> None:
    accepted, operation = run(ada.journal.submit(Submission("ada", "s:sample:0", "sample", b"{}", 0)))
    run(ada.journal.finish([Outcome(operation.id, b"{}")]))
    words = []
    for asked in (accepted.request, "0" * 48):
        with pytest.raises(NotFound) as caught:
            run(ada.journal.future(asked, "eve"))
        words.append(caught.value.message.replace(asked, ""))
    assert words[0] == words[1]


def test_client_text_never_becomes_a_file_name(ada: Store, run: Run) -> None:
    evil = "../../../../tmp/evil"
    run(ada.journal.submit(Submission(evil, evil, "sample", b"x" * (Limits().small_bytes + 1), 0)))
    names = [path.name for path in (ada.data / "payloads").iterdir()]
    assert len(names) == 1
    assert set(names[0]) <= set("0123456789abcdef-")
    assert not Path("/tmp/evil").exists()
