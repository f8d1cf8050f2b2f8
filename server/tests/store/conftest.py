"""A store in a temporary directory, and rows to put into it."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from twinkle_server.operations import Accepted, Operation, Submission
from twinkle_server.store import Store, models, open_store
from twinkle_server.store.records import Model, Session

T = TypeVar("T")
Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of the newest version, made once."""
    data = tmp_path_factory.mktemp("migrated")
    open_store(data).close()
    return data / "twinkle.db"


@pytest.fixture
def store(tmp_path: Path, migrated: Path) -> Iterator[Store]:
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    shutil.copy(migrated, data)
    opened = open_store(data)
    yield opened
    opened.close()


@pytest.fixture
def run() -> Iterator[Run]:
    """Runs coroutines, all on one loop."""
    with asyncio.Runner() as runner:
        yield runner.run


def session_of(tenant: str, name: str = "s", created: float = 1.0) -> Session:
    return Session(f"{tenant}-{name}", tenant, created, created)


def model_of(session: Session, number: int = 0) -> Model:
    created = session.created
    return Model(f"{session.id}:train:{number}", session.tenant, session.id, number, "base", 8, created, created)


@pytest.fixture
def a_model(store: Store) -> Callable[..., Awaitable[tuple[Model, Operation]]]:
    """Makes a session, and a model in it by its first operation."""

    async def make(tenant: str = "ada", name: str = "s") -> tuple[Model, Operation]:
        session = session_of(tenant, name)
        await store.sessions.create(session)
        model = model_of(session)
        accepted = await create(store, model)
        return model, accepted[1]

    return make


async def create(store: Store, model: Model) -> tuple[Accepted, Operation]:
    submission = Submission(model.tenant, model.id, "create", b"{}", 0)
    return await store.journal.submit(submission, lambda connection: models.add(connection, model))
