"""The tables of models and of sampling sessions."""

import random
from dataclasses import replace
from typing import Any
from unittest import mock

from service_simulation.parts.support import (
    TENANTS,
    newest,
    opened,
    refused,
    rows_of,
)
from service_simulation.reference import demand
from service_simulation.virtual import Clock

from twinkle_server.errors import Gone, NotFound, SequenceConflict
from twinkle_server.operations import Snapshot
from twinkle_server.store import Store, folders, models, samplers
from twinkle_server.store.records import Model, Sampler, Session


async def keep_models(clock: Clock, draw: random.Random) -> None:
    """Models and sampling sessions are what was written of them."""
    with opened(draw) as store:
        database, table = store.database, store.models
        for tenant in TENANTS:
            await store.sessions.create(Session(f"s-{tenant}", tenant, 1.0, 1.0))
        await store.sessions.create(Session("s-over", "ada", 1.0, 1.0))
        await store.sessions.end("ada", "s-over", "expired", 2.0)
        model = dict[str, Model]()
        folders_of = dict[str, str]()
        for number in range(22):
            tenant, now = draw.choice(TENANTS), clock.wall() + number
            what = draw.choice(["add"] * 3 + ["status"] * 3 + ["snapshot", "gone", "again", "look"])
            name = draw.choice(sorted(model)) if model and draw.random() < 0.9 else "nowhere"
            known = model.get(name)
            mine = known is not None and known.tenant == tenant
            if what == "add":
                new = Model(
                    f"s-{tenant}:train:{number}",
                    tenant,
                    f"s-{tenant}",
                    number,
                    "base",
                    8,
                    float(number // 3),
                    now,
                    seed=draw.choice([None, 3]),
                    train_mlp=draw.random() < 0.5,
                    metadata=draw.choice([None, {"a": "b"}]),
                    project=draw.choice([None, "p"]),
                )
                await database.write(lambda connection, new=new: models.add(connection, new))
                model[new.id] = new
                for wrong, kind in (
                    (new, SequenceConflict),
                    (replace(new, id="x", session="s-none"), NotFound),
                    (replace(new, id="x", session="s-over", tenant="ada"), Gone),
                    (replace(new, id="x", tenant="eve"), NotFound),
                ):
                    await refused(database.write(lambda connection, wrong=wrong: models.add(connection, wrong)), kind)
            elif what == "status":
                status: Any = draw.choice(["live", "detached", "corrupted", "gone", "creating"])
                reason = draw.choice([None, "why"])
                if mine:
                    await table.set_status(tenant, name, status, now, reason)
                    known.status, known.reason = status, reason
                    known.detached = now if status in ("detached", "corrupted") else None
                    known.snapshot = None if status == "gone" else known.snapshot
                else:
                    await refused(table.set_status(tenant, name, status, now), NotFound, "does not exist")
            elif what == "snapshot" and known is not None:
                snapshot = Snapshot(name, draw.randrange(9), f"snapshots/f{number}", "digest", 7 + number)
                row = rows_of(store, "SELECT snapshot_number, snapshot_folder, status FROM models WHERE id = ?", name)[
                    0
                ]
                needless = await store.journal.snapshotted(snapshot)
                if row[2] == "gone" or (row[0] is not None and row[0] > snapshot.number):
                    demand(needless == [snapshot.folder], f"{needless} for {snapshot} after {row}")
                else:
                    demand(needless == ([row[1]] if row[1] else []), f"{needless} is not needed, {row} was")
                    known.snapshot = snapshot
                    folders_of[snapshot.folder] = name
                demand(await store.journal.snapshot(name) == known.snapshot, "the newest snapshot")
            elif what == "gone":
                if mine:
                    there = [known.snapshot.folder] if known.snapshot else []
                    demand(await table.gone(tenant, name, now, "over") == there, "the folders of what is gone")
                    known.status, known.reason, known.detached, known.snapshot = "gone", "over", None, None
                else:
                    await refused(table.gone(tenant, name, now, "over"), NotFound)
            elif what == "again":
                bad = [each for each in model.values() if each.status == "corrupted"]
                demand(await table.retry_corrupted(now) == len(bad), "how many are tried again")
                for each in bad:
                    each.status, each.reason, each.detached = "detached", None, each.detached or now
            if draw.random() < 0.2:
                await _look_at_models(store, model, tenant, draw)
        for tenant in TENANTS:
            await _look_at_models(store, model, tenant, draw)
        demand(await folders.all_named(database) == set(folders_of), "the folders that were named")
        with mock.patch.object(folders, "_BATCH", 2):
            gone = sorted(folders_of)[: draw.choice([0, 2, 3, 5])]
            await folders.forget(database, gone)
        demand(await folders.all_named(database) == set(folders_of) - set(gone), "the folders that were forgotten")
        await refused(
            store.journal.snapshotted(Snapshot("none", 1, "snapshots/x", "", 1)), LookupError, "does not exist"
        )


async def _look_at_models(store: Store, model: dict[str, Model], tenant: str, draw: random.Random) -> None:
    table = store.models
    for name, each in model.items():
        if each.tenant == tenant:
            found = await table.get(tenant, name)
            demand(found == each, f"{found}, not {each}")
        else:
            await refused(table.get(tenant, name), NotFound, "does not exist")
    mine = [each for each in model.values() if each.tenant == tenant]
    session = await table.of_session(tenant, f"s-{tenant}")
    demand(session == sorted(mine, key=lambda each: each.number), "the models of a session")
    demand(
        await table.of_session(tenant, "s-none") == [] and await table.of_session("eve", f"s-{tenant}") == [], "none"
    )
    project = draw.choice([None, "p"])
    listed = newest([each for each in mine if project in (None, each.project)])
    offset, limit = draw.choice([-1, 0, 1]), draw.choice([-1, 0, 2, 100])
    page = await table.page(tenant, limit, offset, project)
    demand((page.rows, page.total) == (listed[max(offset, 0) :][: max(limit, 0)], len(listed)), f"a page of {tenant}")
    demand(await table.count(tenant) == sum(each.status in ("creating", "live") for each in mine), "how many models")
    before = draw.choice([None, *(each.detached for each in model.values() if each.detached), 1e12])
    some: Any = draw.choice([("live",), ("detached", "corrupted"), ("creating", "gone")])
    wanted = [each for each in model.values() if each.status in some]
    wanted = [each for each in wanted if before is None or (each.detached is not None and each.detached < before)]
    found_ = await table.with_status(*some, before=before)
    demand({each.id for each in found_} == {each.id for each in wanted}, f"models that are {some}")
    demand([each.created for each in found_] == sorted(each.created for each in wanted), "their order")


async def keep_samplers(clock: Clock, draw: random.Random) -> None:
    """Sampling sessions are what was written of them; inflight ones move together."""
    with opened(draw) as store:
        table, database = store.samplers, store.database
        for tenant in TENANTS:
            await store.sessions.create(Session(f"s-{tenant}", tenant, 1.0, 1.0))
        await store.sessions.create(Session("s-over", "ada", 1.0, 1.0))
        await store.sessions.end("ada", "s-over", "finished", 2.0)
        model = dict[str, Sampler]()
        named = set[str]()
        for number in range(20):
            tenant, now = draw.choice(TENANTS), float(number)
            what = draw.choice(["add"] * 3 + ["move", "join", "look"])
            if what == "add":
                follows = draw.choice([None, None, "m1", "m2"])
                folder_ = None if draw.random() < 0.4 else f"checkpoints/c{number % 4}"
                new = Sampler(
                    f"s-{tenant}:sample:{number}",
                    tenant,
                    f"s-{tenant}",
                    number,
                    "base",
                    now,
                    path=draw.choice([None, "tinker://x"]),
                    folder=folder_,
                    inflight=follows,
                )
                await table.create(new)
                await table.create(replace(new, folder="checkpoints/other"))
                model[new.id] = new
                named |= {folder_} if folder_ else set()
                for field, value in draw.sample([("base", "b2"), ("path", "tinker://y"), ("inflight", "m9")], 1):
                    other = replace(new, **{field: value})
                    await refused(table.create(other), SequenceConflict, "other weights")
                await refused(table.create(replace(new, id="x", session="s-over", tenant="ada")), Gone)
                await refused(table.create(replace(new, id="x", session="s-none")), NotFound)
            elif what == "move":
                follows, folder_ = draw.choice(["m1", "m2", "m3"]), f"checkpoints/c{draw.randrange(5)}"
                mine = [each for each in model.values() if (each.tenant, each.inflight) == (tenant, follows)]
                before = {each.folder for each in mine} - {None, folder_}
                moved = await database.write(
                    lambda connection, t=tenant, f=follows, to=folder_: samplers.move_inflight(connection, t, f, to)
                )
                demand(sorted(moved) == sorted(filter(None, before)), f"{moved} was used before, not {before}")
                for each in mine:
                    each.folder = folder_
            elif what == "join":
                name = draw.choice(sorted(model)) if model else "nowhere"
                if name in model and model[name].tenant == tenant:
                    model[name].clones += 1
                    demand(await table.join(tenant, name) == model[name].clones, "the number of a client")
                else:
                    await refused(table.join(tenant, name), NotFound, "does not exist")
            for follows in ("m1", "m2"):
                found = await database.read(
                    lambda connection, t=tenant, f=follows: samplers.inflight_folder(connection, t, f)
                )
                own = {each.folder for each in model.values() if (each.tenant, each.inflight) == (tenant, follows)} - {
                    None
                }
                demand(found in own if own else found is None, f"{found} of {own}")
            if draw.random() > 0.2:
                continue
            for name, each in model.items():
                if each.tenant == tenant:
                    demand(await table.get(tenant, name) == each, f"{await table.get(tenant, name)}, not {each}")
                else:
                    await refused(table.get(tenant, name), NotFound, "does not exist")
            mine = [each for each in model.values() if each.tenant == tenant]
            demand(await table.of_session(tenant, f"s-{tenant}") == mine, "sampling sessions of a session")
            demand(await table.count(tenant) == len(mine), "how many have not ended")
        demand(await folders.all_named(database) >= named, "folders that were named")
        tenant = draw.choice(TENANTS)
        await store.sessions.end(tenant, f"s-{tenant}", "finished", 77.0)
        for each in model.values():
            each.ended = 77.0 if each.tenant == tenant else None
            demand(await table.get(each.tenant, each.id) == each, "a sampling session after the end")
        demand(await table.count(tenant) == 0, "sampling sessions after the end")
        await store.sessions.end(tenant, f"s-{tenant}", "finished", 78.0)
        demand(all(each.ended == 77.0 for each in await table.of_session(tenant, f"s-{tenant}")), "it ended twice")
