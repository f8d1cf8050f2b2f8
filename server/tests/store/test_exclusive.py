"""The reservation of the service for a full-parameter model, which follows the rows of models."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from twinkle_server.errors import Locked
from twinkle_server.runtime.exclusive import ExclusiveModel
from twinkle_server.store import Store, models
from twinkle_server.store.records import Model, Session

Run = Callable[[Awaitable[Any]], Any]


async def add(store: Store, tenant: str, number: int, rank: int) -> Model:
    session = Session(f"{tenant}-{number}", tenant, 1.0, 1.0)
    await store.sessions.create(session)
    model = Model(f"{session.id}:train:0", tenant, session.id, 0, "base", rank, 1.0, 1.0, status="live")
    await store.database.write(lambda connection: models.add(connection, model))
    return model


def test_others_are_refused_until_the_model_has_gone(store: Store, run: Run) -> None:
    exclusive = ExclusiveModel(store.models)

    async def story() -> None:
        await exclusive.check("bob")
        model = await add(store, "ada", 0, rank=0)
        await exclusive.reserve("ada", model.id)
        await exclusive.reserve("ada", model.id)
        await exclusive.check("ada")
        with pytest.raises(Locked, match="reserved for a full-parameter training"):
            await exclusive.check("bob")
        with pytest.raises(Locked, match="another full-parameter model"):
            await exclusive.reserve("ada", "another")
        restarted = ExclusiveModel(store.models)
        await restarted.resume()
        with pytest.raises(Locked):
            await restarted.check("bob")
        await store.models.set_status("ada", model.id, "detached", 2.0)
        await exclusive.check("bob")
        await restarted.reserve("bob", "his")

    run(story())


def test_work_of_others_prevents_a_reservation(store: Store, run: Run) -> None:
    exclusive = ExclusiveModel(store.models)

    async def story() -> None:
        await add(store, "ada", 0, rank=8)
        other = await add(store, "bob", 0, rank=8)
        with pytest.raises(Locked, match="1 models of others are in use"):
            await exclusive.reserve("ada", "hers")
        await exclusive.check("bob")
        await store.models.set_status("bob", other.id, "gone", 2.0)
        await exclusive.reserve("ada", "hers")
        with pytest.raises(Locked):  # its row is being written
            await exclusive.check("bob")

    run(story())
