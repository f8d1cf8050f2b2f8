"""What clients and operators do when it is calm, each compared with what must come of it. A simulation does some."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import orjson
from service_simulation.checks import snapshot_of
from service_simulation.clients import Client, Trainer
from service_simulation.disk import SimulatedDatabase
from service_simulation.reference import Event, Source, demand
from service_simulation.virtual import run_as
from service_simulation.world import World

from twinkle_server.errors import BadRequest, NotFound, StoreError
from twinkle_server.store import Store, lease, open_store
from twinkle_server.store.records import AuditEntry, Key, Usage

AGE = 2e7
"""Seconds after which every result, and everything of models whose sessions ended, is too old to be kept."""


async def look_at_lists(world: World, clients: list[Client], draw: random.Random) -> None:
    """Read every list whole and in pages."""
    for client in clients:
        mine = [other for other in clients if other.tenant == client.tenant]
        sessions = {other.session for other in mine}
        await _paged(client, "/sessions", "sessions", sessions, lambda row: row)
        models = {trainer.id for other in mine for trainer in other.models}
        await _paged(client, "/training_runs", "training_runs", models, lambda row: row["training_run_id"])
        paths = {path for other in mine for trainer in other.models for path in trainer.paths}
        paths |= {path for other in mine for path in other.copies}
        await _paged(client, "/checkpoints", "checkpoints", paths, lambda row: row["tinker_path"])
        usage = await _get(client, "/billing/usage/checkpoints/current")
        demand(usage["data"][0]["checkpoint_count"] == len(paths), f"{usage} of {paths}")
        await _search(client, mine)
        whole = await _get(client, "/sessions/{session_id}", session_id=client.session)
        demand(whole.get("training_run_ids") == [trainer.id for trainer in client.models], f"{whole}")
        for trainer in client.models:
            own = {path for path in trainer.paths}
            await _paged(client, "/training_runs/{run}/checkpoints", "checkpoints", own,
                         lambda row: row["tinker_path"], run=trainer.id)  # fmt: skip
            run = await _get(client, "/training_runs/{run}", run=trainer.id)
            demand((run["lora_rank"], run["model_owner"], run["corrupted"]) == (8, client.tenant, False), f"{run}")
            last = run.get("last_checkpoint", {}).get("tinker_path")
            demand(last in [*(path for path in trainer.paths if "/weights/" in path), None], f"{last}")


async def _paged(
    client: Client, path: str, name: str, wanted: set[str], key: Callable[[Any], str], **values: str
) -> None:
    whole = [key(row) for row in (await _get(client, path, **values))[name]]
    demand(set(whole) == wanted and len(whole) == len(wanted), f"{path} of {client.tenant}: {whole}, not {wanted}")
    if len(whole) > 1:
        pages = []
        for offset in range(len(whole)):
            answer = await _get(client, path, _query={"limit": 1, "offset": offset}, **values)
            pages += [key(row) for row in answer[name]]
            if "cursor" in answer:
                demand(answer["cursor"]["total_count"] == len(whole), f"{path}: {answer['cursor']}")
        demand(pages == whole, f"{path} in pages: {pages}, not {whole}")


async def _get(client: Client, path: str, _query: Any = None, **values: str) -> Any:
    return await client.post(path, method="GET", values=values, query=_query or {})


async def _search(client: Client, mine: list[Client]) -> None:
    async def found(**wanted: Any) -> list[str]:
        rows: list[str] = []
        cursor = None
        while True:
            body = {**wanted, "limit": 1} if cursor is None else {**wanted, "limit": 1, "cursor": cursor}
            answer = await client.post("/sessions/search", body)
            rows += [row["session_id"] for row in answer["sessions"]]
            cursor = answer.get("next_cursor")
            if cursor is None:
                return rows

    sessions = sorted(other.session for other in mine)
    demand(sorted(await found()) == sessions, "a search for all sessions")
    for query in ({"user_metadata": {"name": client.name}}, {"display_name": client.name.upper()[1:]},
                  {"session_id": client.session}):  # fmt: skip
        same = [other.session for other in mine if query.get("session_id") or client.name[1:] in other.name]
        wanted = [client.session] if "display_name" not in query else same
        demand(sorted(await found(**query)) == sorted(wanted), f"a search for {query}")
    demand(await found(user_metadata={"name": "nobody"}) == [], "a search for nobody")
    demand(await found(project_ids=["none"]) == [], "a search for no project")
    active = sorted(other.session for other in mine if not other.finished)
    demand(sorted(await found(statuses=[{"type": "active"}])) == active, "a search for active sessions")
    await client.ask("/sessions/{session_id}/project", {"project_id": "p"}, method="PUT",
                     values={"session_id": client.session})  # fmt: skip
    demand(client.session in await found(project_ids=["p"]), "a search for a project")


async def change_checkpoints(world: World, clients: list[Client], draw: random.Random) -> None:
    """Publish, copy, limit and delete checkpoints; models that were made from them stay what they are."""
    client = draw.choice(clients)
    saved = [(trainer, path, source) for trainer in client.models for path, source in trainer.saved]
    if not saved:
        return
    trainer, path, source = draw.choice(saved)
    others = [other for other in clients if other.tenant != client.tenant and not other.finished]
    place = dict(zip(("run", "kind", "name"), path.removeprefix("tinker://").split("/"), strict=True))
    one = "/training_runs/{run}/checkpoints/{kind}/{name}"
    if others:
        other = others[0]
        demand((await other.ask("/weights_info", {"tinker_path": path})).status == 404, "a foreign checkpoint is seen")
        demand((await other.ask(one, method="DELETE", values=place)).status == 404, "a foreign checkpoint is deleted")
        await client.post(f"{one}/publish", values=place)
        demand((await other.ask("/weights_info", {"tinker_path": path})).status == 200, "a published one is not seen")
        await _from(other, path, source)
        await client.post(f"{one}/publish", values=place, method="DELETE")
        demand((await other.ask("/weights_info", {"tinker_path": path})).status == 404, "it was published no more")
    if not client.finished:
        await _from(client, path, source)
        copied = await client.post("/copy_weights", {"source_path": path}, headers={"x-idempotency-key": "c"})
        again = await client.post("/copy_weights", {"source_path": path}, headers={"x-idempotency-key": "c"})
        demand(copied == again, f"a copy was made twice: {copied} {again}")
        await _from(client, copied["tinker_path"], source)
        client.copies.add(copied["tinker_path"])
    if draw.random() < 0.5:
        await client.post(one, values=place, method="DELETE")
        demand((await client.ask(one, values=place, method="DELETE")).status == 404, "a checkpoint is deleted twice")
    else:
        await client.post(f"{one}/ttl", {"ttl_seconds": 3600}, values=place, method="PUT")
        demand((await client.ask("/weights_info", {"tinker_path": path})).status == 200, "it expired too early")
        world.clock.offset += 3700.0
    demand((await client.ask("/weights_info", {"tinker_path": path})).status == 404, "a checkpoint is still there")
    trainer.paths.discard(path)
    trainer.saved.remove((path, source))
    await asyncio.sleep(130.0)  # upkeep sweeps
    assert world.life is not None
    if (service := world.life.service) is not None and draw.random() < 0.5:
        service._upkeep._is_full = lambda: True  # type: ignore[method-assign]
        await asyncio.sleep(15.0)
        demand((await service.status())["trash"]["entries"] == 0, "the disk is full, and the trash is not emptied")
        del service._upkeep._is_full
    await look_at_lists(world, clients, draw)


async def _from(client: Client, path: str, source: Source) -> None:
    """Make a model from a checkpoint, and read it."""
    trainer = Trainer(client, len(client.models))
    client.world.trainers.append(trainer)
    if await trainer.create(path, source):
        ends = client.world.clock.now + 60.0
        while (model := await _store(client.world).models.get(client.tenant, trainer.id)).snapshot is None:
            demand(client.world.clock.now < ends, f"no snapshot covers what {trainer.id} was made from")
            await asyncio.sleep(1.0)
        demand(model.status == "live", f"{trainer.id} is {model.status}")
        await trainer.read()


async def let_expire(world: World, clients: list[Client], draw: random.Random) -> None:
    """Be silent until every session has expired; models are kept and can be worked with, samplers are not."""
    silent = [client for client in clients if not client.finished]
    for trainer in world.trainers:
        if not trainer.gone:
            await trainer.read()  # so that the engine has it
    for client in silent:
        client.finished = True
    await asyncio.sleep(1000.0)
    for client in silent:
        answer = await client.ask("/session_heartbeat", {"session_id": client.session})
        demand(answer.status == 410, f"a silent session did not expire: {answer}")
        body = {
            "session_id": client.session,
            "model_seq_id": 99,
            "base_model": "ledger/model",
            "lora_config": {"rank": 8},
        }
        demand((await client.ask("/create_model", body)).status == 410, "an expired session has a new model")
    store = _store(world)
    for trainer in world.trainers:
        if not trainer.gone:
            model = await store.models.get(trainer.client.tenant, trainer.id)
            demand(model.status == "detached" and model.detached is not None, f"{trainer.id} is {model.status}")
            needless = not trainer.changed or bool(world.planned.refuse)  # what is not in the engine needs none
            demand(model.snapshot is not None or needless, f"{trainer.id} has no snapshot")
    for client in clients:
        for sampler in await store.samplers.of_session(client.tenant, client.session):
            demand(sampler.ended is not None, f"{sampler.id} has not ended")


async def grow_old(world: World, clients: list[Client], draw: random.Random) -> None:
    """Let results become too old; what models need to be restored is kept."""
    if draw.random() < 0.5:
        await let_expire(world, clients, draw)
    kept_run = all(client.finished for client in clients)
    if kept_run:
        await asyncio.sleep(200.0)  # until all are detached
    world.clock.offset += AGE
    await asyncio.sleep(130.0)
    for client in clients:
        for request, _ in client.over[:5]:
            answer = await client.ask("/retrieve_future", {"request_id": request})
            demand(answer.status == 410, f"an old result is {answer}")
        client.over.clear()
    world.aged = True
    if not kept_run:
        return
    await asyncio.sleep(400.0)
    for trainer in world.trainers:
        if not trainer.gone:
            answer = await trainer.client.ask("/optim_step", {"model_id": trainer.id, "seq_id": 10**6})
            demand(answer.status == 410, f"{trainer.id} is still there: {answer}")
            trainer.gone = True
    world.all_gone = True


async def let_rot(world: World, clients: list[Client], draw: random.Random) -> None:
    """Damage the snapshot of a model while the service is down: that model is lost, and says so; the others are not."""
    alive = [trainer for trainer in world.trainers if not trainer.gone]
    if not alive:
        return
    trainer = draw.choice(alive)
    await world.stop()
    folder = snapshot_of(world, trainer.id)
    if folder is None:
        return
    (world.data / folder / "ledger.json").write_text("{}")
    trainer.history.excuses = (*trainer.history.excuses, "cannot restore this model")
    await trainer.read()
    while (event := trainer.history.events[trainer.following - 1]).ending == "cancelled":
        await trainer.read()
    demand(event.ending == "failed", f"{trainer.id} was restored from a damaged snapshot")
    good = [path for path in trainer.paths if "/weights/" in path]
    last = event.error.rpartition("its last good checkpoint is ")[2]
    demand(last in good if good else "it has no checkpoint" in event.error, f"{trainer.id}: {event.error}")
    trainer.gone = True
    store = _store(world)
    await asyncio.sleep(1.0)
    model = await store.models.get(trainer.client.tenant, trainer.id)
    demand((model.status, model.detached is None) == ("corrupted", False), f"{trainer.id} is {model.status}")


async def ask_for_others(world: World, clients: list[Client], draw: random.Random) -> None:
    """Ask for what belongs to others, what never was, and numbers that are too far away."""
    for client in clients:
        for request, _ in client.over[-2:]:
            for other in clients:
                if other.tenant != client.tenant:
                    answer = await other.ask("/retrieve_future", {"request_id": request})
                    demand(answer.status == 404, f"a foreign future is {answer}")
                    answer = await other.ask("/cancel_future", {"request_id": request})
                    demand(answer.status == 404, f"a foreign future is cancelled: {answer}")
        for other in clients:
            if other.tenant != client.tenant and client.models:
                body = {"model_id": client.models[0].id, "seq_id": 10**5}
                demand((await other.ask("/optim_step", body)).status == 404, "a foreign model takes an operation")
        for unknown in ("0" * 48, "x", "é" * 48):
            demand((await client.ask("/retrieve_future", {"request_id": unknown})).status == 404, "an unknown future")
        for trainer in client.models:
            if not trainer.gone:
                body = {"model_id": trainer.id, "seq_id": trainer.following + 4097}
                demand((await client.ask("/optim_step", body)).status == 422, "a number far away is taken")


async def finish(world: World, clients: list[Client], draw: random.Random) -> None:
    """End a session while an operation may be under way: its models are kept, its samplers are not."""
    client = draw.choice(clients)
    if client.finished:
        return
    alive = [trainer for trainer in client.models if not trainer.gone]
    count = draw.choice([0, 1, 3])
    async with asyncio.TaskGroup() as tasks:
        for trainer in alive:
            trainer.history.excuses = (*trainer.history.excuses, "session was finished")
            for _ in range(count):
                tasks.create_task(trainer.train())
        await asyncio.sleep(draw.choice([0.0, 0.01, 0.1]))
        service = world.life.service if world.life is not None else None
        known = not count and service is not None and all(trainer.id in service.dispatcher.queues for trainer in alive)
        if known and draw.random() < 0.4:
            world.kill_engine("at the end of a session")  # its models are in no engine when the session ends
        await client.finish()
    await client.finish()
    demand((await client.ask("/session_heartbeat", {"session_id": client.session})).status == 410, "it has not ended")
    samplers = await _store(world).samplers.of_session(client.tenant, client.session)
    for sampler in samplers[:1]:
        body = {"prompt": {"chunks": []}, "sampling_session_id": sampler.id, "seq_id": 10**6}
        demand((await client.ask("/asample", body)).status == 410, "a sampler of a finished session samples")
    await asyncio.sleep(25.0 if known else 150.0)  # a chore detaches those that were not in memory, or came later
    for trainer in alive:
        model = await _store(world).models.get(trainer.client.tenant, trainer.id)
        demand(model.status == "detached" and model.detached is not None, f"{trainer.id} is {model.status}")
        demand(world.clock.wall() - model.detached < 200.0, f"{trainer.id} is detached since {model.detached}")
    for trainer in alive:
        for _ in range(2):  # the chore may have detached it again within the second after the first read
            await trainer.read()
            await asyncio.sleep(1.0)
            model = await _store(world).models.get(trainer.client.tenant, trainer.id)
            if model.status == "live":
                break
        demand(model.status == "live" and model.detached is None, f"{trainer.id} is {model.status}, and was read")


async def unload(world: World, clients: list[Client], draw: random.Random) -> None:
    """Unload a model: nothing of it is left, and the others stay."""
    alive = [trainer for trainer in world.trainers if not trainer.gone]
    if alive:
        trainer = draw.choice(alive)
        await trainer.unload()
        model = await _store(world).models.get(trainer.client.tenant, trainer.id)
        demand((model.status, model.snapshot) == ("gone", None), f"{trainer.id} was unloaded: {model}")
        demand(model.reason == "it was unloaded", f"{trainer.id} is gone: {model.reason}")
        if draw.random() < 0.5:
            await world.stop()
            answer = await trainer.client.ask("/optim_step", {"model_id": trainer.id, "seq_id": trainer.following})
            demand(answer.status == 410, f"{trainer.id} was unloaded, and answers {answer}")


async def open_twice(world: World, clients: list[Client], draw: random.Random) -> None:
    """Try to serve a directory that is served; then take the lease from the service, which must not write any more."""
    try:
        open_store(world.data, database=SimulatedDatabase).close()
        demand(False, "two services have a directory")
    except StoreError as error:
        demand("is served by process" in str(error), error)
    beside = open_store(world.data, serve=False, database=SimulatedDatabase)
    demand(beside.lease is None and beside.instance == _store(world).instance, "the directory opened beside is another")
    if draw.random() < 0.5:
        owner = replace(lease.Owner.current(), pid=2**22 + 1, started=1)
        taken = lease.take(beside.database, world.data, -1, take_over=True, owner=owner)
        demand(taken.epoch == _store(world).journal.context.epoch + 1, "the epoch did not grow")
        beside.close()
        world.expects_loss = True
        client = draw.choice(clients)
        alive = [trainer for trainer in client.models if not trainer.gone]
        if alive:
            trainer = alive[0]
            body = {"model_id": trainer.id, "seq_id": trainer.following, "adam_params": {}}
            answer = await client.ask_once("/optim_step", body)
            demand(answer.status == 503, f"a service without the lease takes an operation: {answer}")
            assert world.life is not None
            assert world.life.service is not None
            demand(not world.life.service.healthy() and world.life.service.lost.is_set(), "it does not know")
            demand(not world.life.service.ready()[0], "it is ready")
            service = world.life.service
            again = await client.ask_once("/optim_step", body)
            demand((again.status, again.headers.get("retry-after")) == (503, "30.0"), f"it takes operations: {again}")
            demand(
                "another process now serves" in str(again.json()) and "another process" in service.ready()[1]["store"],
                "why",
            )
            demand(service.dispatcher.stopped, "it goes on sending")
        world.kill_service("it lost the lease")
        world.expects_loss = False
    else:
        beside.close()


async def keep_records(world: World, clients: list[Client], draw: random.Random) -> None:
    """Keys, audit, usage and recorded samples, as an operator and the endpoints use them."""
    store, now = _store(world), world.clock.wall()
    names = [f"k{number}" for number in range(3)]
    keys = [Key(name, "ada", name, "user", f"p-{name}", "h", now + at, {"bytes": at}) for at, name in enumerate(names)]
    for key in keys:
        await store.keys.create(key)
    for wrong in (replace(keys[0], id="other", prefix="q"),):
        demand(await _refused(store.keys.create(wrong), BadRequest), "two keys have a name")
    demand(await store.keys.all() == keys, "the keys are others")
    gone = await store.keys.revoke("k1", now + 5.0)
    demand(gone == replace(keys[1], revoked=now + 5.0), f"{gone}")
    demand(await store.keys.all() == [keys[0], keys[2]], "a revoked key is listed")
    demand(await store.keys.all(revoked=True) == [keys[0], gone, keys[2]], "a revoked key is lost")
    demand(await _refused(store.keys.revoke("k1", now), NotFound), "a key is revoked twice")
    await store.keys.create(replace(keys[1], id="new", prefix="n"))

    entries = [AuditEntry(100.0 + at, tenant, event, {"n": at}) for at, (tenant, event) in enumerate(
        [("ada", "a"), ("bob", "a"), ("ada", "b"), ("ada", "a")])]  # fmt: skip
    for entry in entries:
        await store.audit.record(entry)
    mine = [entries[3], entries[2], entries[0]]
    demand(await store.audit.entries("ada", 0.0, 1000.0) == mine, "the audit log is another")
    demand(await store.audit.entries("ada", 100.0, 103.0) == mine[1:], "the bounds of the audit log")
    demand(await store.audit.entries("ada", 0.0, 1000.0, "a") == [mine[0], mine[2]], "the events of the audit log")
    demand(await store.audit.entries("ada", 0.0, 1000.0, limit=1) == mine[:1], "the limit of the audit log")
    demand(await store.audit.forget(101.0) == 1, "what the audit log forgets")
    demand(await store.audit.entries("ada", 0.0, 1000.0) == mine[:2], "what the audit log keeps")

    for tenant, day, tokens in (
        ("zoe", "2000-01-01", 1),
        ("zoe", "2000-01-01", 2),
        ("zoe", "2000-01-02", 4),
        ("yan", "2000-01-01", 8),
    ):
        await store.usage.add(Usage(tenant, day, "training", tokens, tokens))
    await store.usage.add_all([Usage("zoe", "2000-01-01", "sampling_sample", 16)])
    found = await store.usage.between("zoe", "2000-01-01", "2000-01-02")
    expected = [Usage("zoe", "2000-01-01", "sampling_sample", 16, 0), Usage("zoe", "2000-01-01", "training", 3, 3)]
    demand(found == expected, f"the usage is {found}")
    demand(len(await store.usage.between("zoe", "2000-01-01", "2000-01-03")) == 3, "the usage of two days")
    await _record_samples(world, clients, draw)


async def _record_samples(world: World, clients: list[Client], draw: random.Random) -> None:
    client = draw.choice(clients)
    if client.finished:
        return
    store, now = _store(world), world.clock.wall()
    number = client.next_sampler()
    body = {"session_id": client.session, "sampling_session_seq_id": number, "base_model": "ledger/model"}
    sampler = (await client.post("/create_sampling_session", body))["sampling_session_id"]
    again = (await client.post("/create_sampling_session", body))["sampling_session_id"]
    demand(sampler == again, "a sampling session is made twice")
    requests = [await client.submit_sample(sampler, record=record) for record in (True, True, False)]
    for request in requests:
        await client.result(request)
    use = store.recorded.use
    tenant, session = client.tenant, client.session
    demand(await use(tenant, session, requests[:2], 0.0, now + 50.0) == set(requests[:2]), "what was recorded")
    demand(await use(tenant, session, requests, 0.0, now + 50.0) == set(requests[:2]), "what was not recorded")
    demand(await use("nobody", session, requests, 0.0, now) == set(), "what others recorded")
    demand(await use(tenant, "other", requests, 0.0, now) == set(), "what another session recorded")
    demand(await use(tenant, session, requests, now + 51.0, now) == set(), "what was used long ago")
    demand(await use(tenant, session, requests[:1], now + 50.0, now) == set(requests[:1]), "when it was used")
    for joined in (1, 2):
        made = await client.post("/join_sampling_session", {"sampling_session_id": sampler})
        demand(made["client_counter"] == joined, f"{made}")
    demand(
        (await client.ask("/join_sampling_session", {"sampling_session_id": "x:sample:1"})).status == 404, "no sampler"
    )
    other = {**body, "base_model": None, "model_path": f"tinker://{client.session}:train:0/sampler_weights/none"}
    demand((await client.ask("/create_sampling_session", other)).status == 404, "a sampler of nothing")


async def _refused(work: Awaitable[Any], kind: type[Exception]) -> bool:
    try:
        await work
    except kind:
        return True
    return False


async def look_at_status(world: World, clients: list[Client], draw: random.Random) -> None:
    """Compare what the service says of itself with what must be."""
    assert world.life is not None
    service = world.life.service
    assert service is not None
    ends = world.clock.now + 200.0
    while not service.ready()[0] and world.clock.now < ends:
        await asyncio.sleep(5.0)
    status = await service.status()
    orjson.dumps(status)
    demand(status["ready"] and not status["draining"] and status["store"] == "writable", f"{status}")
    demand((status["engine"], status["last_pass"]) == ("up", "no failure"), f"{status}")
    demand((status["open_futures"], status["polls"], status["in_engine"]) == (0, 0, 0), f"{status}")
    sessions = len(clients) + len(world.natives)
    demand(sum(status["sessions"].values()) == sessions, f"{status['sessions']}")
    demand(sum(status["models"].values()) >= len(world.trainers), f"{status['models']}")
    demand(service.queue_state("x") == ("active", None), f"{service.queue_state('x')}")
    counts = status["engine_restarts"], status["queues"]
    demand(counts == (service.supervisor.restarts, len(service.dispatcher.queues)), f"{status}")
    began = service.runtime_status._started
    demand(abs(status["up_seconds"] - (world.clock.wall() - began)) < 0.2, f"{status}")
    info = service.info
    demand((info.name, info.tokenizer) == ("ledger/model", world.settings.tokenizer or info.tokenizer), f"{info}")
    demand(
        info.context > 0 and info.vocabulary > 0 and status["paths"] == [dict(each) for each in info.paths], f"{info}"
    )
    demand(service.healthy() and not service.lost.is_set(), "it is lost")
    demand(all(service.queued(client.tenant) == 0 for client in clients), "operations are queued")


async def fill_up(world: World, clients: list[Client], draw: random.Random) -> None:
    """Wait behind a missing number until the limit of waiting operations is reached; repetitions are still answered."""
    alive = [trainer for client in clients if not client.finished for trainer in client.models if not trainer.gone]
    assert world.life is not None
    service = world.life.service
    limit = world.settings.limits.queued
    if not alive or limit > 100 or service is None:
        return
    trainer = draw.choice(alive)
    client, first = trainer.client, trainer.following
    while service.queued(client.tenant):
        await asyncio.sleep(1.0)
    requests, began = [], world.clock.now
    for number in range(first + 1, first + 1 + limit):
        body = {"model_id": trainer.id, "seq_id": number, "adam_params": {}}
        answer = await client.ask_once("/optim_step", body)
        demand(answer.status == 200, f"operation {number - first} of {limit}: {answer}")
        requests.append(answer.json()["request_id"])
    demand(service.queued(client.tenant) == limit, f"{service.queued(client.tenant)} wait")
    body = {"model_id": trainer.id, "seq_id": first + 1 + limit, "adam_params": {}}
    answer = await client.ask_once("/optim_step", body)
    demand(
        answer.status == 429 and f"you have {limit} (limit {limit})" in str(answer.json()), f"over the limit: {answer}"
    )
    again = await client.ask_once("/optim_step", {**body, "seq_id": first + 1})
    demand(again.status == 200 and again.json()["request_id"] == requests[0], f"a repetition at the limit: {again}")
    await asyncio.sleep(max(0.0, began + 5.0 - world.clock.now))
    waiting = await client.ask_once("/retrieve_future", {"request_id": requests[0]})
    told = waiting.json()
    demand((told["type"], told["queue_state"]) == ("try_again", "paused_capacity"), f"{told}")
    missing = f"number {first} of this model has not arrived; {limit} operations wait for"
    demand(missing in told["queue_state_reason"], f"{told}")
    await client.post("/cancel_future", {"request_id": requests[-1]})
    cancelled = await client.result(requests[-1])
    demand(cancelled.json() == {"error": "the request was cancelled", "category": "user"}, f"{cancelled}")
    demand(service.queued(client.tenant) == limit - 1, f"{service.queued(client.tenant)} wait after one was cancelled")
    first_event = trainer.history.add(Event(first, "step"))
    for place, request in enumerate(requests):
        event = trainer.history.add(Event(first + 1 + place, "step", request=request))
        event.ending = "cancelled" if request == requests[-1] else None
    trainer.skip(limit + 1)
    await trainer.submit_step(first_event)
    for place, request in enumerate(requests[:-1]):
        trainer.take(trainer.history.events[first + 1 + place], await client.result(request))
    await trainer.read()


async def lose_number(world: World, clients: list[Client], draw: random.Random) -> None:
    """Never send a number: what waits for it fails after `gap_fail`, not before, and the model goes on."""
    alive = [trainer for client in clients if not client.finished for trainer in client.models if not trainer.gone]
    if not alive:
        return
    trainer = draw.choice(alive)
    client, first, times = trainer.client, trainer.following, world.settings.times
    await trainer.client.ask("/session_heartbeat", {"session_id": client.session})
    began = world.clock.now
    body = {"model_id": trainer.id, "seq_id": first + 1, "adam_params": {}}
    request = (await client.post("/optim_step", body))["request_id"]
    answer = await client.result(request)
    waited = world.clock.now - began
    demand(times.gap_fail <= waited < times.gap_fail + 6.0, f"what waits for a lost number fails after {waited} s")
    lost = trainer.history.add(Event(first, "step"))
    later = trainer.history.add(Event(first + 1, "step", request=request))
    trainer.history.lost.add(first)
    trainer.skip(2)
    trainer.take(later, answer)
    demand(later.ending == "failed" and "did not arrive within 6" in later.error, f"{later}")
    await trainer.submit_step(lost)  # much too late
    demand(lost.ending == "failed" and "did not arrive within 6" in lost.error, f"{lost}")
    await trainer.read()


async def stop_slowly(world: World, clients: list[Client], draw: random.Random) -> None:
    """End the service while somebody waits: who waits is let go, what is new is refused, and all goes on afterwards."""
    alive = [trainer for client in clients if not client.finished for trainer in client.models if not trainer.gone]
    life = world.life
    assert life is not None
    if not alive or life.service is None:
        return
    trainer, service = draw.choice(alive), life.service
    number = trainer.following + 1
    body = {"model_id": trainer.id, "seq_id": number, "adam_params": {}}
    request = (await trainer.client.post("/optim_step", body))["request_id"]
    waiting = asyncio.create_task(trainer.client.ask_once("/retrieve_future", {"request_id": request}))
    await asyncio.sleep(1.0)
    demand(service.futures.polls == 1, f"{service.futures.polls} wait")
    draining = asyncio.create_task(run_as(life.process, service.drain()))
    began = world.clock.now
    await asyncio.sleep(0.001)
    refused = await trainer.client.ask_once("/optim_step", {**body, "seq_id": number - 1})
    demand(refused.status == 503 and "shutting down" in str(refused.json()), f"a service that ends: {refused}")
    demand(refused.headers.get("retry-after") == "5.0", f"a service that ends: {refused}")
    state, reason = service.queue_state(trainer.id)
    demand(state == "paused_capacity" and "shutting down" in str(reason), f"{state}: {reason}")
    demand(not service.ready()[0] and service.ready()[1]["draining"] and service.healthy(), f"{service.ready()}")
    await asyncio.wait([draining])
    demand(world.clock.now - began < world.settings.times.drain + 25.0, "the end takes too long")
    told = (await waiting).json()
    demand(told["type"] == "try_again" and world.clock.now - began < 45.0, f"who waits is not let go: {told}")
    demand(not service.futures.polls, "somebody waits for a service that ends")
    await run_as(life.process, service.drain())
    for each in alive:
        model = await _store(world).models.get(each.client.tenant, each.id)
        needless = not each.changed or bool(world.planned.refuse)
        demand(model.snapshot is not None or needless, f"{each.id} has no snapshot at the end")
    await world.stop()
    event = trainer.history.add(Event(number - 1, "step"))
    later = trainer.history.add(Event(number, "step", request=request))
    trainer.skip(2)
    await trainer.submit_step(event)
    trainer.take(later, await trainer.client.result(request))
    await trainer.read()


def _store(world: World) -> Store:
    assert world.life is not None
    assert world.life.store is not None
    return world.life.store


Act = Callable[[World, list[Client], random.Random], Awaitable[None]]
ACTS: tuple[Act, ...] = (
    look_at_lists,
    change_checkpoints,
    ask_for_others,
    keep_records,
    fill_up,
    lose_number,
    stop_slowly,
    unload,
    finish,
    open_twice,
    let_rot,
    let_expire,
    grow_old,
)
"""In the order in which they can follow each other."""
