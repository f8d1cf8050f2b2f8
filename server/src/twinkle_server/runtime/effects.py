"""What operations change in the store beside the log: models live and end, checkpoints and sampling sessions appear."""

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import orjson
from sqlalchemy import Connection

from twinkle_server.errors import NotFound
from twinkle_server.failpoints import reach
from twinkle_server.ids import CheckpointPath
from twinkle_server.operations import Category, Operation, Outcome
from twinkle_server.payloads import Create, Load, Save
from twinkle_server.ports import Database
from twinkle_server.store import checkpoints, models, samplers
from twinkle_server.store.checkpoints import Checkpoints
from twinkle_server.store.models import Models
from twinkle_server.store.records import Checkpoint, Model, ModelStatus, Sampler

_log = logging.getLogger(__name__)
_PLACES = ("snapshots", "checkpoints")


class Records(Protocol):
    """The store, as effects need it."""

    @property
    def database(self) -> Database:
        """Transactions."""

    @property
    def models(self) -> Models:
        """See `store.models`."""

    @property
    def checkpoints(self) -> Checkpoints:
        """See `store.checkpoints`."""


class StoreEffects:
    """The `Effects` of `ports`, in the tables of the store.

    Args:
        data: the data directory.
        store: its tables.
    """

    def __init__(self, data: Path, store: Records) -> None:
        self._data = data
        self._store = store
        self._unwanted: list[str] = []

    def done(self, operation: Operation, extra: dict[str, Any], body: bytes) -> Outcome:
        """See `ports.Effects`."""
        if operation.kind == "create":
            return _created(operation)
        if operation.kind == "save":
            return _saved(operation, extra)
        if operation.kind == "load":
            load = Load.parse(_payload(operation))
            return _json(operation, {"type": "load_weights", "model_id": operation.queue_id, "path": load.path})
        if operation.kind == "unload":
            return self._unloaded(operation)
        return Outcome(operation.id, result=body)

    def _unloaded(self, operation: Operation) -> Outcome:
        def also(connection: Connection) -> None:
            with contextlib.suppress(NotFound):
                snapshot = models.get(connection, operation.tenant, operation.queue_id).snapshot
                models.set_status(
                    connection, operation.tenant, operation.queue_id, "gone", time.time(), "it was unloaded"
                )
                self._unwanted.extend([snapshot.folder] if snapshot else [])

        return _json(operation, {"type": "unload_model", "model_id": operation.queue_id}, also)

    async def unloaded(self) -> None:
        """See `ports.Effects`."""
        unwanted, self._unwanted = self._unwanted, []
        await self.remove(unwanted)

    async def closed(self, tenant: str, model: str) -> tuple[str, Category] | None:
        """See `ports.Effects`."""
        try:
            found = await self._store.models.get(tenant, model)
        except NotFound:
            return None
        if found.status == "gone":
            return f"this model no longer exists: {found.reason or 'it was unloaded'}", "user"
        if found.status == "corrupted":
            return found.reason or "this model cannot be made again", "server"
        return None

    async def attached(self, tenant: str, model: str) -> None:
        """See `ports.Effects`."""
        await self._move(tenant, model, "detached", "live")

    async def detached(self, tenant: str, model: str) -> None:
        """See `ports.Effects`."""
        await self._move(tenant, model, "live", "detached")

    async def _move(self, tenant: str, model: str, before: ModelStatus, after: ModelStatus) -> None:
        with contextlib.suppress(NotFound):
            if (await self._store.models.get(tenant, model)).status == before:
                await self._store.models.set_status(tenant, model, after, time.time())

    async def gone(self, tenant: str, model: str, reason: str) -> None:
        """See `ports.Effects`."""
        with contextlib.suppress(NotFound):
            await self.remove(await self._store.models.gone(tenant, model, time.time(), reason))

    async def corrupted(self, tenant: str, model: str, reason: str) -> None:
        """See `ports.Effects`."""
        with contextlib.suppress(NotFound):
            await self._store.models.set_status(tenant, model, "corrupted", time.time(), reason)

    async def last_checkpoint(self, tenant: str, model: str) -> str | None:
        """See `ports.Effects`."""
        found = await self._store.checkpoints.latest(tenant, [model], time.time())
        newest = found.get((model, "weights"))
        return None if newest is None else str(newest.path)

    async def inflight_folder(self, tenant: str, model: str) -> str | None:
        """See `ports.Effects`."""
        return await self._store.database.read(lambda connection: samplers.inflight_folder(connection, tenant, model))

    async def remove(self, folders: Sequence[str]) -> None:
        """See `ports.Effects`."""
        for folder in folders:
            place, _, name = folder.partition("/")
            if place not in _PLACES or not name.isalnum():
                _log.error("%r is not a snapshot folder; it is not removed", folder)
                continue
            reach("effects.before_remove")
            await asyncio.to_thread(shutil.rmtree, self._data / place / name, ignore_errors=True)


def _created(operation: Operation) -> Outcome:
    create = Create.parse(_payload(operation))
    said: dict[str, Any] = {"type": "create_model", "model_id": operation.queue_id}
    if create.path is not None:
        said |= {"type": "load_weights", "path": create.path}

    def also(connection: Connection) -> None:
        with contextlib.suppress(NotFound):
            models.set_status(connection, operation.tenant, operation.queue_id, "live", time.time())

    return _json(operation, said, also)


def _saved(operation: Operation, extra: dict[str, Any]) -> Outcome:
    save = Save.parse(_payload(operation))
    path = CheckpointPath(operation.queue_id, save.kind, save.name) if save.name is not None else None
    types = {"weights": "save_weights", "sampler_weights": "save_weights_for_sampler"}
    said: dict[str, Any] = {"type": types.get(save.kind, "save_weights_external")}
    if path is not None:
        said["path"] = str(path)
    if save.sampler is not None:
        said["sampling_session_id"] = save.sampler
    if save.kind == "external_weights":
        said["size_bytes"] = extra.get("size_bytes", 0)

    def also(connection: Connection) -> None:
        model, now = models.get(connection, operation.tenant, operation.queue_id), time.time()
        if save.name is not None:
            checkpoints.add(connection, _checkpoint(model, save, save.name, extra, now), save.overwrite)
        if save.sampler is not None:
            _add_sampler(connection, model, save, save.sampler, now)

    return _json(operation, said, also)


def _checkpoint(model: Model, save: Save, name: str, extra: dict[str, Any], now: float) -> Checkpoint:
    return Checkpoint(
        model.tenant,
        model.id,
        save.kind,
        name,
        save.folder,
        int(extra.get("size_bytes", 0)),
        str(extra.get("digest", "")),
        model.base,
        model.rank,
        now,
        expires=None if save.ttl is None else now + save.ttl,
        train_attn=model.train_attn,
        train_mlp=model.train_mlp,
        train_unembed=model.train_unembed,
        has_optimizer=save.kind == "weights",
        metadata=save.metadata,
        project=model.project,
    )


def _add_sampler(connection: Connection, model: Model, save: Save, sampler: str, now: float) -> None:
    session, _, number = sampler.rpartition(":sample:")
    made = Sampler(sampler, model.tenant, session, int(number), model.base, now, folder=save.folder)
    if save.inflight:
        made.inflight = model.id
    samplers.add(connection, made)
    if save.inflight:
        samplers.move_inflight(connection, model.tenant, model.id, save.folder)


def _payload(operation: Operation) -> bytes:
    if operation.payload is None:
        raise LookupError(f"the payload of operation {operation.id} is missing")
    return operation.payload


def _json(operation: Operation, said: dict[str, Any], also: Callable[[Any], None] | None = None) -> Outcome:
    return Outcome(operation.id, result=orjson.dumps(said), also=also)
