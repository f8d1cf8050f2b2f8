"""What operations change in the tables and on the disk, alone."""

import random
from typing import Any

import orjson
from service_simulation.parts.support import opened, refused, rows_of
from service_simulation.reference import demand
from service_simulation.virtual import Clock

from twinkle_server import failpoints
from twinkle_server.errors import BadRequest
from twinkle_server.operations import Create, Load, Operation, Outcome, Save, Snapshot
from twinkle_server.runtime.outcomes import StoreEffects
from twinkle_server.store import models
from twinkle_server.store.records import Checkpoint, Model, Sampler, Session


async def change_records(clock: Clock, draw: random.Random) -> None:
    """Each operation answers what its kind promises, and leaves the rows that it promises."""
    with opened(draw) as store:
        effects = StoreEffects(store.data, store)
        await store.sessions.create(Session("s", "ada", 1.0, 1.0))
        model = Model(
            "s:train:0", "ada", "s", 0, "base", 8, 1.0, 1.0, train_mlp=False, project=draw.choice([None, "p"])
        )
        await store.database.write(lambda connection: models.add(connection, model))

        def operation(kind: Any, payload: bytes | None, queue: str = model.id) -> Operation:
            return Operation(1, "r", "ada", queue, 0, kind, 1, payload=payload)

        async def done(each: Operation, extra: dict[str, Any] | None = None) -> dict[str, Any]:
            outcome: Outcome = effects.done(each, extra or {}, b"body")
            demand((outcome.operation, outcome.error) == (1, None) and outcome.result is not None, f"{outcome}")
            if outcome.in_transaction is not None:
                await store.database.write(outcome.in_transaction)
            return dict(orjson.loads(outcome.result or b"{}"))

        for kind in ("forward", "forward_backward", "optim_step", "sample"):
            demand(
                effects.done(operation(kind, b"x"), {}, b"body") == Outcome(1, result=b"body"), f"the result of {kind}"
            )
        for path in (None, "tinker://x/weights/y"):
            create = Create(rank=8, seed=1, path=path, source=None if path is None else "checkpoints/c")
            said = await done(operation("create", create.dump()))
            wanted = {"type": "create_model", "model_id": model.id}
            demand(said == (wanted if path is None else {**wanted, "type": "load_weights", "path": path}), f"{said}")
            demand((await store.models.get("ada", model.id)).status == "live", "a model that was made is not live")
        said = await done(operation("load", Load(path="tinker://x/weights/y", source="c").dump()))
        demand(said == {"type": "load_weights", "model_id": model.id, "path": "tinker://x/weights/y"}, f"{said}")
        await done(operation("create", Create(rank=8, seed=1).dump(), "s:train:9"))
        await _save(store, model, done, operation, clock, draw)
        await _statuses(store, effects, model, clock)
        demand(await effects.inflight_folder("ada", model.id) == "checkpoints/i2", "the newest inflight weights")
        demand(await effects.inflight_folder("bob", model.id) is None, "foreign inflight weights")
        try:
            effects.done(operation("save", None), {}, b"")
            demand(False, "an operation without a payload")
        except LookupError as error:
            demand("the payload of operation 1 is missing" in str(error), str(error))
        await _remove(store, effects)
        await _end(store, effects, model, done, operation, clock)


async def _save(store: Any, model: Model, done: Any, operation: Any, clock: Clock, draw: random.Random) -> None:
    extra = {"size_bytes": 77, "digest": "d"}
    types = {
        "weights": "save_weights",
        "sampler_weights": "save_weights_for_sampler",
        "external_weights": "save_weights_external",
    }
    for number, kind in enumerate(("weights", "sampler_weights", "external_weights")):
        ttl = draw.choice([None, 60])
        save = Save(kind=kind, folder=f"checkpoints/f{number}", name="n", ttl=ttl, metadata={"a": "b"})
        said = await done(operation("save", save.dump()), extra)
        path = f"tinker://{model.id}/{kind}/n"
        wanted = {"type": types[kind], "path": path} | ({"size_bytes": 77} if kind == "external_weights" else {})
        demand(said == wanted, f"{said}, not {wanted}")
        (row,) = [each for each in (await store.checkpoints.page("ada", clock.wall())).rows if each.kind == kind]
        expires = None if ttl is None else clock.wall() + 60
        demand(
            row
            == Checkpoint(
                "ada",
                model.id,
                kind,
                "n",
                f"checkpoints/f{number}",
                77,
                "d",
                "base",
                8,
                clock.wall(),
                expires,
                True,
                False,
                True,
                kind == "weights",
                False,
                {"a": "b"},
                model.project,
                row.id,
            ),
            f"{row}",
        )
        await refused(done(operation("save", save.dump()), extra), BadRequest, "already exists")
        save.overwrite = True
        save.folder = f"checkpoints/g{number}"
        await done(operation("save", save.dump()))
        (row,) = [each for each in (await store.checkpoints.page("ada", clock.wall())).rows if each.kind == kind]
        demand((row.folder, row.size, row.digest) == (save.folder, 0, ""), f"{row}")
    said = await done(operation("save", Save(kind="external_weights", folder="checkpoints/e", name="e").dump()))
    demand(said["size_bytes"] == 0, f"{said}")
    before = len((await store.checkpoints.page("ada", clock.wall())).rows)
    for number, inflight in enumerate((False, True, True)):
        save = Save(
            kind="sampler_weights", folder=f"checkpoints/i{number}", sampler=f"s:sample:{number}", inflight=inflight
        )
        said = await done(operation("save", save.dump()))
        demand(said == {"type": types["sampler_weights"], "sampling_session_id": f"s:sample:{number}"}, f"{said}")
        sampler = await store.samplers.get("ada", f"s:sample:{number}")
        wanted_sampler = Sampler(
            f"s:sample:{number}",
            "ada",
            "s",
            number,
            "base",
            clock.wall(),
            folder=save.folder,
            inflight=model.id if inflight else None,
        )
        demand(sampler == wanted_sampler, f"{sampler}, not {wanted_sampler}")
    demand((await store.samplers.get("ada", "s:sample:1")).folder == "checkpoints/i2", "inflight weights did not move")
    demand((await store.samplers.get("ada", "s:sample:0")).folder == "checkpoints/i0", "weights that stay have moved")
    demand(len((await store.checkpoints.page("ada", clock.wall())).rows) == before, "unnamed weights are a checkpoint")


async def _statuses(store: Any, effects: StoreEffects, model: Model, clock: Clock) -> None:
    for move, before, after, at in (
        (effects.attached, "detached", "live", None),
        (effects.attached, "corrupted", "corrupted", 1.0),
        (effects.detached, "live", "detached", 5.0),
        (effects.detached, "creating", "creating", None),
    ):
        await store.models.set_status("ada", model.id, before, 1.0)
        await move("ada", model.id)
        await move("bob", model.id)
        await move("ada", "nowhere")
        found = await store.models.get("ada", model.id)
        wanted = clock.wall() if at == 5.0 else at
        demand((found.status, found.detached) == (after, wanted), f"{before} became {found.status} at {found.detached}")
    await store.models.set_status("ada", model.id, "live", 1.0)
    for status, reason, told in (
        ("gone", "why", ("this model no longer exists: why", "user")),
        ("gone", None, ("this model no longer exists: it was unloaded", "user")),
        ("corrupted", "why", ("why", "server")),
        ("corrupted", None, ("this model cannot be restored", "server")),
        ("live", None, None),
    ):
        await store.models.set_status("ada", model.id, status, 1.0, reason)
        demand(await effects.closed("ada", model.id) == told, f"why {status}: {await effects.closed('ada', model.id)}")
    demand(await effects.closed("bob", model.id) is None, "why a foreign one is closed")
    newest = await effects.last_checkpoint("ada", model.id)
    demand(newest == f"tinker://{model.id}/weights/n", f"the last checkpoint is {newest}")
    demand(await effects.last_checkpoint("ada", "nowhere") is None, "the last checkpoint of nothing")
    await effects.corrupted("ada", model.id, "broken")
    await effects.corrupted("ada", "nowhere", "broken")
    found = await store.models.get("ada", model.id)
    demand((found.status, found.reason, found.detached) == ("corrupted", "broken", clock.wall()), f"{found}")
    await store.models.set_status("ada", model.id, "live", 1.0)


async def _remove(store: Any, effects: StoreEffects) -> None:
    kept = ["secret", "payloads/p", "snapshots/x.y", "snapshots", "lock"]
    (store.data / "snapshots" / "x.y").mkdir()
    (store.data / "payloads" / "p").mkdir()
    for name in ("snapshots/a1", "checkpoints/b2"):
        (store.data / name / "deep").mkdir(parents=True)
    reached: list[str] = []
    before = failpoints.watch(reached.append)
    try:
        await effects.remove(
            [*kept, "snapshots/../secret", "snapshots/a1", "snapshots/none", "checkpoints/b2", "snapshots/"]
        )
    finally:
        failpoints.watch(before)
    demand(reached.count("effects.before_remove") == 3, f"{reached}")
    demand(all((store.data / name).exists() for name in kept), "what is no snapshot was removed")
    demand(
        not (store.data / "snapshots/a1").exists() and not (store.data / "checkpoints/b2").exists(),
        "a snapshot is left",
    )


async def _end(store: Any, effects: StoreEffects, model: Model, done: Any, operation: Any, clock: Clock) -> None:
    for number, how in enumerate(("gone", "unload")):
        name = f"snapshots/z{number}"
        (store.data / name).mkdir()
        await store.models.set_status("ada", model.id, "live", 1.0)
        await store.journal.snapshotted(Snapshot(model.id, number, name, "d", 1))
        if how == "gone":
            await effects.gone("bob", model.id, "it is over")
            await effects.gone("ada", "nowhere", "it is over")
            demand((store.data / name).exists(), "a foreign model is gone")
            await effects.gone("ada", model.id, "it is over")
            demand((await store.models.get("ada", model.id)).reason == "it is over", "why it is gone")
        else:
            said = await done(operation("unload", b"{}"))
            demand(said == {"type": "unload_model", "model_id": model.id}, f"{said}")
            demand((store.data / name).exists(), "a snapshot is removed before that is written")
            await effects.unloaded()
            demand((await store.models.get("ada", model.id)).reason == "it was unloaded", "why it is gone")
            await done(operation("unload", b"{}", "nowhere"))
            await done(operation("unload", b"{}"))
            await effects.unloaded()
        demand(
            (await store.models.get("ada", model.id)).status == "gone" and not (store.data / name).exists(),
            "it is left",
        )
    rows = rows_of(store, "SELECT snapshot_number, snapshot_folder, snapshot_size FROM models")
    demand(rows == [(1, None, None)], f"{rows}")
