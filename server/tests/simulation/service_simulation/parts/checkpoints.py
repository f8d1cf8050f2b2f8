"""The tables of checkpoints, keys and usage, and the audit log."""

import random
import time
from collections import Counter
from dataclasses import replace
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

from twinkle_server.errors import BadRequest, NotFound, Unavailable
from twinkle_server.ids import CheckpointPath
from twinkle_server.store import Store, folders, models
from twinkle_server.store.records import AuditEntry, Checkpoint, Key, Model, Session, Usage
from twinkle_server.store.tenants import UsageLog


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
            now += draw.choice([0.0, 1.0, 3.0, 5.0])
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
                ours = newest([each for each in live if (each.run, each.kind) == (run, kind) and there(each)])
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
    listed = newest([each for each in mine if run in (None, each.run) and project in (None, each.project)])
    offset, limit = draw.choice([-1, 0, 1]), draw.choice([-1, 0, 2, 100])
    page = await table.page(tenant, now, limit, offset, run, project)
    demand((page.rows, page.total) == (listed[max(offset, 0) :][: max(limit, 0)], len(listed)), "a page of checkpoints")
    demand(await table.bytes(tenant, now) == sum(each.size for each in mine), "the bytes of checkpoints")
    demand(
        await table.bytes(tenant, now, "p") == sum(each.size for each in mine if each.project == "p"), "of a project"
    )
    last: dict[tuple[str, str], Checkpoint] = {}
    for each in sorted(mine, key=lambda each: (each.created, each.id)):
        if each.run == f"{tenant}:0":
            last[each.run, each.kind] = each
    demand(await table.latest(tenant, [f"{tenant}:0", "none"], now) == last, "the newest checkpoints")
    of = await table.of_sessions(tenant, [f"s-{tenant}", "none"], now)
    demand(of == ({f"s-{tenant}": (len(mine), sum(each.size for each in mine))} if mine else {}), f"{of}")
    demand(await table.of_sessions(tenant, ["none"], now) == {}, "checkpoints of no session")


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
        await _sum_usage(store, clock, draw)


async def _sum_usage(store: Store, clock: Clock, draw: random.Random) -> None:
    """Tokens of operations are summed by day and kind, and written once although a write fails."""
    log, wanted = UsageLog(store.usage), Counter[tuple[str, str]]()
    await log.flush()
    days = {"forward": "training", "forward_backward": "training", "sample": "sampling_sample"}
    for number in range(30):
        kind = draw.choice([*days, "optim_step"])
        what = draw.choice(["add", "add", "add", "flush", "fail", "day"])
        if what == "add":
            log.add(kind, number, "eve")
            if kind in days and number:
                wanted[time.strftime("%Y-%m-%d", time.gmtime(clock.wall())), days[kind]] += number
        elif what == "day":
            clock.offset += 86400.0
        elif what == "flush":
            await log.flush()
        elif wanted:
            log.add("sample", 1, "eve")
            wanted[time.strftime("%Y-%m-%d", time.gmtime(clock.wall())), "sampling_sample"] += 1
            with mock.patch.object(store.usage, "add_all", side_effect=Unavailable("the disk is full")):
                await refused(log.flush(), Unavailable)
    await log.flush()
    await log.flush()
    found = {(each.day, each.kind): each.tokens for each in await store.usage.between("eve", "0", "9")}
    demand(found == dict(wanted), f"the usage is {found}, not {dict(wanted)}")
