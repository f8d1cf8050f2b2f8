"""The tables, the log and the files of the store alone, driven at random, each compared with a model of it."""

import json
import random
import sqlite3
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from service_simulation.disk import Disk, SimulatedDatabase, use_disk
from service_simulation.reference import demand
from service_simulation.virtual import Clock, Still

from twinkle_server.errors import BadRequest, Gone, LeaseLost, NotFound, SequenceConflict
from twinkle_server.ids import CheckpointPath
from twinkle_server.operations import Outcome, Snapshot, Submission
from twinkle_server.settings import Limits, Times
from twinkle_server.store import Store, folders, models, open_store, recorded, retention, samplers
from twinkle_server.store.inspection import DATABASE
from twinkle_server.store.records import AuditEntry, Checkpoint, Key, Model, Sampler, Session, Usage, read_cursor
from twinkle_server.store.sessions import SessionSearch

MEMORY = Path("/dev/shm")
TENANTS = ("ada", "bob")


@contextmanager
def folder() -> Iterator[Path]:
    """Make a folder, and remove it."""
    with tempfile.TemporaryDirectory(prefix="part-", dir=MEMORY if MEMORY.is_dir() else None) as name:
        yield Path(name)


@contextmanager
def opened(draw: random.Random, **options: Any) -> Iterator[Store]:
    """Open a store in a new directory, and close it."""
    with folder() as root:
        use_disk(Disk(Still(draw.getrandbits(32))))
        store = open_store(root / "data", database=SimulatedDatabase, **options)
        try:
            yield store
        finally:
            store.close()


async def refused(work: Awaitable[Any], kind: type[Exception], words: str = "") -> None:
    """Demand that something is refused."""
    try:
        await work
    except kind as error:
        demand(words in str(error), f"{error}, not {words}")
        return
    demand(False, f"it is not refused: {words or kind}")


def rows_of(store: Store, query: str, *values: Any) -> list[Any]:
    """Return rows as another process reads them."""
    with closing(sqlite3.connect(store.data / DATABASE)) as raw:
        return raw.execute(query, values).fetchall()


# Sessions


async def keep_sessions(clock: Clock, draw: random.Random) -> None:
    """Sessions are found by whoever they belong to, in all the ways in which they can be asked for."""
    with opened(draw) as store:
        table, model = store.sessions, dict[str, Session]()
        times = iter(range(1, 1000))
        for number in range(25):
            clock.offset += draw.choice([0.0, 1.0])
            now = clock.wall()
            what = draw.choice(["create"] * 3 + ["beat", "heard", "end", "end", "project", "look", "search", "search"])
            tenant = draw.choice(TENANTS)
            name = draw.choice(sorted(model)) if model and draw.random() < 0.9 else "nowhere"
            known = model.get(name)
            mine = known is not None and known.tenant == tenant
            if what == "create":
                created = now if draw.random() < 0.5 else 100.0 + number // 4
                new = Session(
                    f"s{draw.randrange(10**6):06}",
                    tenant,
                    created,
                    created,
                    tags=draw.choice([[], ["a", "b"]]),
                    metadata={"name": f"n{number % 3}", "x": "y"} if number % 2 else {},
                    project=draw.choice([None, "p", "q"]),
                    display_name=draw.choice([None, "Big_Run", "small%run"]),
                    sdk="1.0",
                )
                await table.create(new)
                await table.create(replace(new, project="other"))
                model[new.id] = new
            elif what == "beat":
                if mine and known.status == "active":
                    await table.heartbeat(tenant, name, now)
                    known.last_heartbeat = now
                else:
                    await refused(table.heartbeat(tenant, name, now), Gone, "is not active")
            elif what == "heard":
                heard = [(tenant, each, float(next(times))) for each in sorted(model)]
                if heard:
                    await table.heard(heard)
                for _, each, at in heard:
                    if model[each].tenant == tenant and model[each].status == "active":
                        model[each].last_heartbeat = at
            elif what == "end":
                status = draw.choice(["finished", "expired"])
                if mine:
                    was = known.status == "active"
                    demand(
                        await table.end(tenant, name, status, now, "why", "more") is was, f"whether {name} was active"
                    )
                    if was:
                        known.status, known.ended, known.reason, known.detail = status, now, "why", "more"  # type: ignore[assignment]
                else:
                    await refused(table.end(tenant, name, status, now), NotFound, "does not exist")
            elif what == "project":
                if mine:
                    await table.set_project(tenant, name, "r")
                    known.project = "r"
                else:
                    await refused(table.set_project(tenant, name, "r"), NotFound, "does not exist")
            elif what == "look":
                await _look_at_sessions(store, model, tenant, draw)
            else:
                await _search_sessions(store, model, tenant, draw)
        for tenant in TENANTS:
            await _look_at_sessions(store, model, tenant, draw)
            await _search_sessions(store, model, tenant, draw)
        await refused(table.search("ada", SessionSearch(cursor="é")), BadRequest, "next_cursor of a previous")
        try:
            read_cursor("AAAA")
            demand(False, "a cursor of nothing")
        except BadRequest:
            pass


def _newest(found: list[Any]) -> list[Any]:
    return sorted(found, key=lambda each: (each.created, each.id), reverse=True)


async def _look_at_sessions(store: Store, model: dict[str, Session], tenant: str, draw: random.Random) -> None:
    table = store.sessions
    for name, session in model.items():
        if session.tenant == tenant:
            demand(await table.get(tenant, name) == session, f"{await table.get(tenant, name)}, not {session}")
        else:
            await refused(table.get(tenant, name), NotFound, "does not exist")
    mine = _newest([each for each in model.values() if each.tenant == tenant])
    offset, limit = draw.choice([-1, 0, 1, 3]), draw.choice([-1, 0, 2, 100])
    page = await table.page(tenant, limit, offset)
    demand((page.rows, page.total) == (mine[max(offset, 0) :][: max(limit, 0)], len(mine)), "a page of sessions")
    before = draw.choice([50.0, 102.0, 1e12])
    active = [each for each in model.values() if each.status == "active"]
    silent = {each.id for each in active if each.last_heartbeat < before}
    demand({each.id for each in await table.silent(before)} == silent, "who is silent")
    demand(sorted(each.id for each in await table.all_active()) == sorted(each.id for each in active), "who is active")
    for edge in active[:2]:
        at = edge.last_heartbeat
        demand(edge.id not in {each.id for each in await table.silent(at)}, "who was heard at this moment is silent")


async def _search_sessions(store: Store, model: dict[str, Session], tenant: str, draw: random.Random) -> None:
    wanted = SessionSearch(limit=draw.choice([-1, 1, 2, 50]))
    found = _newest([each for each in model.values() if each.tenant == tenant])
    if draw.random() < 0.3:
        wanted.projects = draw.choice([["p"], ["p", "q"], ["none"]])
        found = [each for each in found if each.project in wanted.projects]
    if draw.random() < 0.3:
        wanted.metadata = draw.choice([{"x": "y"}, {"name": "n1", "x": "y"}, {"name": "y"}])
        found = [each for each in found if wanted.metadata.items() <= each.metadata.items()]
    if draw.random() < 0.3:
        wanted.display_name = draw.choice(["RUN", "big_", "l%r", "bigxrun"])
        found = [each for each in found if wanted.display_name.lower() in (each.display_name or "").lower()]
    if draw.random() < 0.3:
        wanted.statuses = draw.choice([["active"], ["finished", "expired"]])
        found = [each for each in found if each.status in wanted.statuses]
    if draw.random() < 0.2 and model:
        wanted.session = draw.choice(sorted(model))
        found = [each for each in found if each.id == wanted.session]
    rows: list[Session] = []
    for _ in range(len(model) + 2):
        page = await store.sessions.search(tenant, wanted)
        demand(page.total == len(found) and len(page.rows) <= max(wanted.limit, 1), f"{wanted}: {page}")
        rows += page.rows
        if page.cursor is None:
            break
        demand(len(page.rows) == max(wanted.limit, 1), "a page that is not full has a next one")
        wanted.cursor = page.cursor
    demand(rows == found, f"{wanted}: {rows}, not {found}")


# Models, samplers, checkpoints


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
    listed = _newest([each for each in mine if project in (None, each.project)])
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


async def keep_checkpoints(clock: Clock, draw: random.Random) -> None:
    """Checkpoints are what was written of them, until they are deleted, replaced or expire."""
    with opened(draw) as store:
        table, database, now = store.checkpoints, store.database, 1000.0
        for tenant in TENANTS:
            await store.sessions.create(Session(f"s-{tenant}", tenant, 1.0, 1.0))
            for number in (0, 1):
                new_model = Model(f"{tenant}:{number}", tenant, f"s-{tenant}", number, "base", 8, 1.0, 1.0)
                await database.write(lambda connection, each=new_model: models.add(connection, each))
        live: list[Checkpoint] = []

        def there(each: Checkpoint) -> bool:
            return each.expires is None or each.expires > now

        for number in range(24):
            now += draw.choice([0.0, 1.0, 5.0])
            tenant = draw.choice(TENANTS)
            what = draw.choice(["add"] * 4 + ["delete", "expiry", "publish", "surplus", "expire", "look"])
            run, kind = f"{tenant}:{draw.randrange(2)}", draw.choice(["weights", "sampler_weights"])
            path = CheckpointPath(run, kind, draw.choice("ab"))
            at = next((each for each in live if each.path == path), None)
            if what == "add":
                overwrite = draw.random() < 0.4
                new = Checkpoint(
                    tenant,
                    run,
                    kind,
                    path.name,
                    f"checkpoints/f{number}",
                    10 + number,
                    f"d{number}",
                    "base",
                    8,
                    now,
                    expires=draw.choice([None, None, now + 3.0]),
                    has_optimizer=kind == "weights",
                    metadata=draw.choice([None, {"k": "v"}]),
                    project=draw.choice([None, "p"]),
                )
                if at is not None and not overwrite and there(at):
                    await refused(table.create(new, overwrite), BadRequest, "already exists")
                else:
                    replaced = await table.create(new, overwrite)
                    demand(replaced == (at.folder if at else None), f"{replaced} was replaced")
                    live = [each for each in live if each is not at]
                    live.append(replace(new, id=rows_of(store, "SELECT max(id) FROM checkpoints")[0][0]))
                    demand(new.folder in await folders.all_named(database), "its folder is not named")
            elif what == "delete":
                if at is not None and there(at):
                    await refused(table.delete("eve", path, now), NotFound, "does not exist")
                    demand(await table.delete(tenant, path, now) == at.folder, "the folder of what was deleted")
                    live.remove(at)
                    demand(rows_of(store, "SELECT deleted FROM checkpoints WHERE id = ?", at.id) == [(now,)], "when")
                else:
                    await refused(table.delete(tenant, path, now), NotFound, "does not exist")
            elif what in ("expiry", "publish"):
                value = draw.choice([None, now + 2.0, now + 50.0]) if what == "expiry" else draw.random() < 0.7
                change = table.set_expiry if what == "expiry" else table.publish
                if at is not None and there(at):
                    await refused(change("eve", path, now, value), NotFound)
                    await change(tenant, path, now, value)
                    setattr(at, "expires" if what == "expiry" else "public", value)
                else:
                    await refused(change(tenant, path, now, value), NotFound, "does not exist")
            elif what == "surplus":
                keep = draw.choice([-1, 0, 1])
                ours = _newest([each for each in live if (each.run, each.kind) == (run, kind) and there(each)])
                gone = await table.surplus(tenant, run, kind, keep, now)
                demand(gone == ours[max(keep, 0) :], f"{gone} is too much of {ours}")
                live = [each for each in live if each not in gone]
            elif what == "expire":
                over = [each for each in live if not there(each)]
                went = await table.expire(now)
                demand({each.id for each in went} == {each.id for each in over}, f"{went} expired, not {over}")
                live = [each for each in live if there(each)]
            if draw.random() < 0.15 or number == 23:
                await _look_at_checkpoints(store, [each for each in live if there(each)], tenant, now, draw)


async def _look_at_checkpoints(
    store: Store, live: list[Checkpoint], tenant: str, now: float, draw: random.Random
) -> None:
    table = store.checkpoints
    mine = [each for each in live if each.tenant == tenant]
    for each in live:
        if each.tenant == tenant:
            found = await table.get(tenant, each.path, now)
            demand(found == each, f"{found}, not {each}")
        else:
            await refused(table.get(tenant, each.path, now), NotFound)
        if each.tenant == tenant or each.public:
            demand(await table.find(tenant, each.path, now) == each, "what a tenant may load")
        else:
            await refused(table.find(tenant, each.path, now), NotFound)
    run, project = draw.choice([None, f"{tenant}:0"]), draw.choice([None, "p"])
    listed = _newest([each for each in mine if run in (None, each.run) and project in (None, each.project)])
    offset, limit = draw.choice([-1, 0, 1]), draw.choice([-1, 0, 2, 100])
    page = await table.page(tenant, now, limit, offset, run, project)
    demand((page.rows, page.total) == (listed[max(offset, 0) :][: max(limit, 0)], len(listed)), "a page of checkpoints")
    demand(await table.bytes(tenant, now) == sum(each.size for each in mine), "the bytes of checkpoints")
    demand(
        await table.bytes(tenant, now, "p") == sum(each.size for each in mine if each.project == "p"), "of a project"
    )
    newest: dict[tuple[str, str], Checkpoint] = {}
    for each in sorted(mine, key=lambda each: (each.created, each.id)):
        if each.run == f"{tenant}:0":
            newest[each.run, each.kind] = each
    demand(await table.latest(tenant, [f"{tenant}:0", "none"], now) == newest, "the newest checkpoints")
    of = await table.of_sessions(tenant, [f"s-{tenant}", "none"], now)
    demand(of == ({f"s-{tenant}": (len(mine), sum(each.size for each in mine))} if mine else {}), f"{of}")
    demand(await table.of_sessions(tenant, ["none"], now) == {}, "checkpoints of no session")


# Keys, audit, usage


async def keep_records(clock: Clock, draw: random.Random) -> None:
    """Keys, the audit log and usage are what was written."""
    with opened(draw) as store:
        keys: list[Key] = []
        for number in range(10):
            name = draw.choice("abc")
            held = [each for each in keys if each.name == name and each.revoked is None]
            if draw.random() < 0.6:
                key = Key(
                    f"k{number:02}", draw.choice(TENANTS), name, "user", f"p{number}", "h", float(number // 2), {"b": 1}
                )
                if held:
                    await refused(store.keys.create(key), BadRequest, "already exists")
                else:
                    await store.keys.create(key)
                    keys.append(key)
            elif held:
                held[0].revoked = float(number)
                demand(await store.keys.revoke(name, float(number)) == held[0], "the key that was revoked")
            else:
                await refused(store.keys.revoke(name, 1.0), NotFound, "no active key")
            ordered = sorted(keys, key=lambda each: (each.created, each.id))
            demand(await store.keys.all(revoked=True) == ordered, "all keys")
            demand(await store.keys.all() == [each for each in ordered if each.revoked is None], "keys that hold")
        tenants = {row[0] for row in rows_of(store, "SELECT id FROM tenants")}
        demand(tenants >= {each.tenant for each in keys}, f"the tenants are {tenants}")
        entries: list[AuditEntry] = []
        for number in range(12):
            entries.append(AuditEntry(float(number // 2), draw.choice(TENANTS), draw.choice(["x", "y"]), {"n": number}))
            await store.audit.record(entries[-1])
        for _ in range(5):
            tenant, since, until = draw.choice(TENANTS), draw.choice([0.0, 2.0]), draw.choice([3.0, float("inf")])
            event, limit = draw.choice([None, "x"]), draw.choice([-1, 2, 1000])
            found = await store.audit.entries(tenant, since, until, event, limit)
            mine = [each for each in reversed(entries) if each.tenant == tenant and since <= each.time < until]
            mine = [each for each in mine if event in (None, each.event)]
            demand(found == mine[: max(limit, 0)], f"the entries {since} {until} {event} {limit}: {found}")
        before = draw.choice([0.0, 1.0, 3.0])
        demand(await store.audit.forget(before) == sum(each.time < before for each in entries), "what was forgotten")
        left = [each for each in reversed(entries) if each.tenant == "ada" and each.time >= before]
        demand(await store.audit.entries("ada") == left, "what is left of the audit log")
        used: dict[tuple[str, str, str], tuple[int, int]] = {}
        for number in range(12):
            each = Usage(
                draw.choice(TENANTS), f"2000-01-0{1 + number % 3}", draw.choice(["training", "storage"]), number, 2
            )
            tokens, size = used.get((each.tenant, each.day, each.kind), (0, 0))
            used[each.tenant, each.day, each.kind] = tokens + each.tokens, size + each.bytes
            await (store.usage.add(each) if number % 2 else store.usage.add_all([each]))
        for first, end in (("2000-01-01", "2000-01-03"), ("2000-01-02", "2000-01-04"), ("2000-01-02", "2000-01-02")):
            sums = [
                Usage(*key, *value) for key, value in sorted(used.items()) if key[0] == "ada" and first <= key[1] < end
            ]
            demand(await store.usage.between("ada", first, end) == sums, f"the usage from {first} to {end}")


# The log


async def keep_log(clock: Clock, draw: random.Random) -> None:
    """Operations come in once, end once, and what is not needed any more goes, and nothing else."""
    times = Times(read_result=50.0, kept_result=500.0, kept_record=300.0)
    with (
        opened(draw, limits=Limits(small_bytes=40), times=times) as store,
        mock.patch.object(retention, "_BATCH", 2),
        mock.patch.object(retention, "_PIECE", 3),
        mock.patch.object(recorded, "_AT_ONCE", 2),
        mock.patch.object(retention, "_PAGES", 2),
        mock.patch.object(retention, "_SPARE", 1),
    ):
        log = _Log(store, clock, draw)
        await log.begin()
        for _ in range(40):
            await log.step()
        await log.check()
        store.journal.context = replace(store.journal.context, epoch=99)
        for work in (
            store.journal.submit(Submission("ada", log.models[0], "forward", b"late", 900)),
            store.journal.finish([Outcome(1, b"x")]),
            store.journal.blame([1]),
            store.journal.snapshotted(Snapshot(log.models[0], 5, "snapshots/z", "", 1)),
        ):
            await refused(work, LeaseLost, "another process now serves")


class _Log:
    """The log, and a model of it."""

    def __init__(self, store: Store, clock: Clock, draw: random.Random) -> None:
        self.store, self.journal, self.clock, self.draw = store, store.journal, clock, draw
        self.models = ["s:train:0", "s:train:1"]
        self.queues = [*self.models, "s:sample:0"]
        self.rows: dict[int, dict[str, Any]] = {}
        self.last = dict.fromkeys(self.queues, 0)
        self.covered: dict[str, int | None] = dict.fromkeys(self.queues)
        self.status = dict.fromkeys(self.models, "creating")
        self.used_at: dict[int, float] = {}
        self.was_recorded: dict[int, float] = {}

    async def begin(self) -> None:
        await self.store.sessions.create(Session("s", "ada", 1.0, 1.0))
        for number, name in enumerate(self.models):
            model = Model(name, "ada", "s", number, "base", 8, 1.0, 1.0)
            await self.store.database.write(lambda connection, model=model: models.add(connection, model))

    async def step(self) -> None:
        self.clock.now += self.draw.choice([0.0, 1.0, 30.0])
        what = self.draw.choice(
            ["submit"] * 5
            + [
                "again",
                "finish",
                "finish",
                "finish",
                "read",
                "snapshot",
                "blame",
                "purge",
                "record",
                "gone",
                "next",
                "refuse",
                "use",
            ]
        )
        await getattr(self, f"_{what}")()
        if self.draw.random() < 0.3:
            await self.check()

    def _pending(self) -> list[dict[str, Any]]:
        return [row for row in self.rows.values() if row["status"] == "pending"]

    async def _submit(self, number: int | None = -1, refusal: str | None = None, record: bool = False) -> None:
        queue = self.draw.choice(self.queues) if not record else "s:sample:0"
        kind: Any = (
            "sample" if queue == "s:sample:0" else self.draw.choice(["forward", "optim_step", "load", "create", "save"])
        )
        place = self.last[queue] if number == -1 else number
        if place is None:
            queue, kind = self.draw.choice(self.models), "unload"
        payload = b"x" * self.draw.choice([3, 40, 41])
        if kind in ("load", "create", "sample", "save"):
            field = "folder" if kind == "save" else "source"
            named = {field: f"checkpoints/f{len(self.rows)}"} if self.draw.random() < 0.8 else {}
            payload = json.dumps(named).encode().ljust(41 if kind == "sample" and self.draw.random() < 0.3 else 40)
        asked = Submission("ada", queue, kind, payload, place, 3, refusal)
        ran: list[int] = []

        def also(connection: Any) -> None:
            ran.append(1)
            if record:
                recorded.add(connection, "ada", "s", queue, place, self.clock.wall())

        accepted, operation = await self.journal.submit(asked, also)
        covered = self.covered[queue]
        wanted = (
            place
            if place is not None
            else max(
                [row["number"] for row in self.rows.values() if row["queue"] == queue]
                + [covered if covered is not None else -1],
                default=-1,
            )
            + 1
        )
        status = "failed" if refusal else "pending"
        demand(
            (
                operation.number,
                operation.status,
                operation.kind,
                operation.queue_id,
                operation.attempts,
                operation.tokens,
            )
            == (wanted, status, kind, queue, 0, 3),
            f"{operation}, not {wanted}",
        )
        demand(accepted.fresh and bool(ran) is (refusal is None), "whether what goes with it was written")
        demand(operation.payload == (payload if status == "pending" else None), "its payload")
        self.last[queue] = max(self.last[queue], wanted + 1)
        where = None if refusal else "row" if len(payload) <= 40 else "file"
        self.rows[operation.id] = {
            "id": operation.id,
            "request": accepted.request,
            "queue": queue,
            "number": wanted,
            "kind": kind,
            "status": status,
            "payload": payload,
            "where": where,
            "asked": asked,
            "error": refusal,
            "category": "user" if refusal else None,
            "attempts": 0,
            "created": self.clock.wall(),
            "finished": self.clock.wall() if refusal else None,
            "read": None,
            "result": None,
            "dropped": False,
            "composition": None,
        }
        if record:
            self.was_recorded[operation.id] = self.clock.wall()

    async def _next(self) -> None:
        await self._submit(None)

    async def _refuse(self) -> None:
        await self._submit(refusal="it is refused")

    async def _record(self) -> None:
        await self._submit(record=True)

    async def _use(self) -> None:
        wanted = [row["request"] for row in self.rows.values() if row["queue"] == "s:sample:0"][:6]
        since, now = self.clock.wall() - self.draw.choice([0.0, 40.0, 1e6]), self.clock.wall()
        order = {row["request"]: number for number, row in self.rows.items()}
        found: set[str] = set()
        for begin in range(0, len(wanted), 2):
            piece = wanted[begin : begin + 2]
            here = {each for each in piece if self.was_recorded.get(order[each], -1.0) >= since}
            found |= here
            if len(here) < len(piece):
                break
        demand(await self.store.recorded.use("ada", "s", wanted, since, now) == found, "which are recorded")
        for each in found:
            self.was_recorded[order[each]] = now
        demand(await self.store.recorded.use("bob", "s", wanted, 0.0, now) == set(), "foreign records")
        demand(await self.store.recorded.use("ada", "t", wanted, 0.0, now) == set(), "records of another session")

    async def _again(self) -> None:
        rows = [row for row in self.rows.values() if row["asked"].number is not None and row["error"] is None]
        if not rows:
            return
        row = self.draw.choice(rows)
        accepted, operation = await self.journal.submit(row["asked"])
        demand((accepted.request, accepted.fresh, operation.id) == (row["request"], False, row["id"]), "it came twice")
        other = replace(row["asked"], payload=b"something else")
        await refused(self.journal.submit(other), SequenceConflict, "was used for another request")
        foreign = replace(row["asked"], tenant="bob")
        await refused(self.journal.submit(foreign), NotFound, "does not exist")
        covered = self.covered[row["queue"]]
        if covered is not None and (
            missing := [
                number
                for number in range(covered + 1)
                if not any(each["number"] == number and each["queue"] == row["queue"] for each in self.rows.values())
            ]
        ):
            old = Submission("ada", row["queue"], "forward", b"old", missing[-1])
            await refused(self.journal.submit(old), Gone, "has expired")

    async def _finish(self) -> None:
        rows = self.draw.sample(self._pending(), min(len(self._pending()), self.draw.choice([1, 2])))
        outcomes, wanted = [], []
        for row in rows:
            how = self.draw.choice(["done", "done", "done", "failed", "cancelled", "refused"])
            result = b"y" * self.draw.choice([0, 40, 45])
            outcome = Outcome(row["id"], result, composition=self.draw.choice([None, "[1]"]))
            if how == "failed":
                outcome = Outcome(row["id"], None, "it failed", "unknown")
            elif how == "cancelled":
                outcome = Outcome(row["id"], None, self.draw.choice([None, "nobody waits"]), cancelled=True)
            elif how == "refused":

                def also(connection: Any) -> None:
                    raise BadRequest("there is no room")

                outcome.also = also
            elif self.draw.random() < 0.5:
                outcome.also = lambda connection: None
            outcomes.append(outcome)
            wanted.append((row, how, result))
        if not rows:
            return
        written = await self.journal.finish(outcomes)
        now = self.clock.wall()
        for (row, how, result), outcome in zip(wanted, written, strict=True):
            row["finished"] = now
            row["status"] = {"done": "done", "cancelled": "cancelled"}.get(how, "failed")
            if how == "done":
                row["result"] = result
                row["composition"] = outcomes[written.index(outcome)].composition
                demand(outcome.result == result and outcome.error is None, f"{outcome}")
            elif how == "refused":
                row["error"], row["category"] = "there is no room", "user"
                demand(
                    (outcome.error, outcome.category, outcome.result) == ("there is no room", "user", None),
                    f"{outcome}",
                )
            elif how == "failed":
                row["error"], row["category"] = "it failed", "unknown"
            else:
                row["error"] = outcome.error or "the request was cancelled"
                row["category"] = "user"
            if row["kind"] == "create" and how != "done" and self.status[row["queue"]] == "creating":
                self.status[row["queue"]] = "gone"
            if how != "done" or row["kind"] in ("sample", "unload"):
                row["where"] = row["composition"] = None
        again = await self.journal.finish([Outcome(wanted[0][0]["id"], None, "too late")])
        told = (again[0].error is None, again[0].cancelled, again[0].error)
        first = wanted[0][0]
        demand(
            told == (first["status"] == "done", first["status"] == "cancelled", first["error"]),
            f"it ended twice: {again}",
        )
        await refused(self.journal.finish([Outcome(10**6, b"z" * 30)]), LookupError, "does not exist")

    async def _read(self) -> None:
        if not self.rows:
            return
        row = self.draw.choice(list(self.rows.values()))
        await refused(self.journal.future(row["request"], "bob"), NotFound, "does not exist")
        await refused(self.journal.future("f" * 48, "ada"), NotFound, "does not exist")
        if row["dropped"]:
            await refused(self.journal.future(row["request"], "ada"), Gone, "has expired")
            return
        future = await self.journal.future(row["request"], "ada")
        found = (future.kind, future.status, future.queue_id, future.result, future.error)
        demand(found == (row["kind"], row["status"], row["queue"], row["result"], row["error"]), f"{future}, not {row}")
        if row["status"] != "pending":
            demand(row["category"] in (None, future.category), f"{future}")
            demand(self.journal.reads.get(row["id"], -1.0) <= self.clock.wall(), "when it was read")
            demand(row["id"] in self.journal.reads, "it is not noted that it was read")

    async def _snapshot(self) -> None:
        queue = self.draw.choice(self.models)
        if not self.last[queue]:
            return
        number = self.draw.randrange(self.last[queue])
        old = rows_of(self.store, "SELECT snapshot_folder FROM models WHERE id = ?", queue)[0][0]
        name = f"snapshots/n{len(self.rows)}x{self.draw.randrange(10**6)}"
        needless = await self.journal.snapshotted(Snapshot(queue, number, name, "d", 9))
        before = self.covered[queue]
        if self.status[queue] == "gone" or (before is not None and before > number):
            demand(needless == [name], f"{needless} is needed")
            return
        demand(needless == ([old] if old else []), f"{needless} is needed, not {old}")
        self.covered[queue] = number
        for row in self.rows.values():
            if row["queue"] == queue and row["number"] <= number and row["status"] != "pending":
                row["where"] = row["composition"] = None

    async def _blame(self) -> None:
        rows = self.draw.sample(list(self.rows.values()), min(2, len(self.rows)))
        await self.journal.blame([row["id"] for row in rows])
        for row in rows:
            row["attempts"] += row["status"] == "pending"

    async def _gone(self) -> None:
        if self.draw.random() < 0.3:
            queue = self.draw.choice(self.models)
            await self.store.models.gone("ada", queue, self.clock.wall(), "over")
            self.status[queue] = "gone"

    async def _purge(self) -> None:
        if self.draw.random() < 0.4:
            self.clock.now += self.draw.choice([60.0, 600.0, 8 * 86400.0])
        now = self.clock.wall()
        for operation, at in self.journal.reads.items():
            row = self.rows.get(operation)
            if row is not None and row["read"] is None:
                row["read"] = at
        before = rows_of(self.store, "PRAGMA freelist_count")[0][0]
        done = await self.store.retention.purge(now)
        free = rows_of(self.store, "PRAGMA freelist_count")[0][0]
        demand(
            free <= 1 and done.pages >= before - 1,
            f"{free} pages are free, {before} were, {done.pages} were given back",
        )
        self.was_recorded = {number: at for number, at in self.was_recorded.items() if at >= now - 300.0}
        results = payloads = gone = 0
        for number, row in list(self.rows.items()):
            over = (row["read"] is not None and row["read"] < now - 50.0) or (
                row["finished"] is not None and row["finished"] < now - 500.0
            )
            if over and not row["dropped"] and number not in self.was_recorded:
                row["dropped"], row["result"], row["error"] = True, None, None
                results += 1
        for row in self.rows.values():
            if self.status.get(row["queue"]) == "gone" and row["where"] and row["status"] != "pending":
                row["where"] = row["composition"] = None
                payloads += 1
        for number, row in list(self.rows.items()):
            covered = self.covered[row["queue"]]
            free = (
                row["queue"] not in self.models
                or self.status[row["queue"]] == "gone"
                or (covered is not None and row["number"] <= covered)
            )
            old = row["finished"] is not None and row["finished"] < now - 7 * 86400.0
            if old and row["dropped"] and row["where"] is None and free:
                del self.rows[number]
                gone += 1
        demand(
            (done.results, done.payloads, done.operations) == (results, payloads, gone),
            f"{done}, not {(results, payloads, gone)}",
        )
        if before <= 1 and not (results or payloads or gone):
            demand(done.pages == 0, f"{done.pages} pages were given back of {before}")

    async def check(self) -> None:
        query = """SELECT id, request, tenant, lane, number, kind, tokens, status, attempts, error, category, dropped,
            created, finished, read, epoch FROM operations"""
        epoch = self.store.journal.context.epoch
        rows = {row[0]: row[1:] for row in rows_of(self.store, query)}
        wanted = {
            number: (
                row["request"],
                "ada",
                row["queue"],
                row["number"],
                row["kind"],
                3,
                row["status"],
                row["attempts"],
                row["error"],
                row["category"],
                int(row["dropped"]),
                row["created"],
                row["finished"],
                row["read"],
                epoch,
            )
            for number, row in self.rows.items()
        }
        demand(
            rows == wanted, f"the log: {[each for each in rows.items() if wanted.get(each[0]) != each[1]]} of {wanted}"
        )
        for table, key in (("payloads", "payload"), ("results", "result")):
            kept = {row[0]: bytes(row[1]) for row in rows_of(self.store, f"SELECT operation, data FROM {table}")}
            names = [row[0] for row in rows_of(self.store, f"SELECT {key} FROM operations WHERE {key} > ''")]
            files = {path.name for path in (self.store.data / table).iterdir()}
            demand(files == set(names) and len(files) == len(names), f"files of {table}: {files}, not {names}")
            listed = self.store.retention.payload_files() if key == "payload" else self.store.retention.result_files()
            demand(await listed == files, f"files of {table} that are named")
            if key == "payload":
                own = {number: row["payload"] for number, row in self.rows.items() if row["where"] == "row"}
            else:
                own = {
                    number: row["result"]
                    for number, row in self.rows.items()
                    if row["result"] is not None and len(row["result"]) <= 40
                }
            demand(kept == own, f"rows of {table}: {kept}, not {own}")
        for number, row in self.rows.items():
            if row["where"]:
                demand(await self.journal.payload(number) == row["payload"], "a payload")
            else:
                await refused(self.journal.payload(number), LookupError)
            demand(await self.journal.composition(number) == row["composition"], "how passes were composed")
        found = {row[0] for row in rows_of(self.store, "SELECT operation FROM compositions")}
        demand(found == {number for number, row in self.rows.items() if row["composition"] is not None}, "compositions")
        pending = [each.id for each in await self.journal.pending()]
        order = sorted(self._pending(), key=lambda row: (row["queue"], row["number"]))
        demand(pending == [row["id"] for row in order], "what is not over")
        for queue in self.queues:
            after = [each.number for each in await self.journal.after(queue, 2)]
            mine = sorted(row["number"] for row in self.rows.values() if row["queue"] == queue and row["number"] > 2)
            demand(after == mine, f"what came after in {queue}")
        sources = {
            str(next(iter(json.loads(row["payload"]).values()), ""))
            for row in self.rows.values()
            if row["where"] == "row"
            and (
                row["kind"] in ("load", "create") or (row["kind"] in ("sample", "save") and row["status"] == "pending")
            )
        } - {""}
        snapshots = {row[0] for row in rows_of(self.store, "SELECT snapshot_folder FROM models") if row[0]}
        needed = await self.store.retention.referenced()
        demand(needed == snapshots | sources, f"{needed} are needed, not {snapshots | sources}")
        status = dict(rows_of(self.store, "SELECT id, status FROM models"))
        demand(status == self.status, f"models are {status}, not {self.status}")


Part = Callable[[Clock, random.Random], Awaitable[None]]
PARTS: tuple[Part, ...] = (keep_sessions, keep_models, keep_samplers, keep_checkpoints, keep_records, keep_log)
