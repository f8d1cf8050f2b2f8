"""The table of sessions."""

import random
from dataclasses import replace

from service_simulation.parts.support import TENANTS, newest, opened, refused
from service_simulation.reference import demand
from service_simulation.virtual import Clock

from twinkle_server.errors import BadRequest, Gone, NotFound
from twinkle_server.store import Store
from twinkle_server.store.records import Session, read_cursor
from twinkle_server.store.sessions import SessionSearch


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


async def _look_at_sessions(store: Store, model: dict[str, Session], tenant: str, draw: random.Random) -> None:
    table = store.sessions
    for name, session in model.items():
        if session.tenant == tenant:
            demand(await table.get(tenant, name) == session, f"{await table.get(tenant, name)}, not {session}")
        else:
            await refused(table.get(tenant, name), NotFound, "does not exist")
    mine = newest([each for each in model.values() if each.tenant == tenant])
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
    found = newest([each for each in model.values() if each.tenant == tenant])
    if draw.random() < 0.3:
        wanted.projects = draw.choice([["p"], ["p", "q"], ["none"]])
        found = [each for each in found if each.project in wanted.projects]
    if draw.random() < 0.3:
        wanted.metadata = draw.choice([{"x": "y"}, {"name": "n1", "x": "y"}, {"name": "y"}])
        found = [each for each in found if wanted.metadata.items() <= each.metadata.items()]
    if draw.random() < 0.3:
        wanted.display_name = draw.choice(["RUN", "big_", "l%r", "b_g", "s%n", "bigxrun"])
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
