"""The single writer of results: outcomes and snapshots reach the journal in the order in which they happened.

`StoreEffects` applies the effects of operations on the rest of the store: status of models, checkpoints, and sampling
sessions.
"""

import asyncio
import contextlib
import logging
import shutil
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import orjson
from sqlalchemy import Connection

from twinkle_server.errors import Busy, LeaseLost, NotFound
from twinkle_server.failpoints import reach
from twinkle_server.ids import CheckpointPath
from twinkle_server.operations import Category, Create, Load, Operation, Outcome, Save
from twinkle_server.ports import Database, Journal
from twinkle_server.store import checkpoints, models, samplers
from twinkle_server.store.checkpoints import Checkpoints
from twinkle_server.store.models import Models
from twinkle_server.store.records import EMBEDS, Checkpoint, Model, ModelStatus, Sampler, embeds

_log = logging.getLogger(__name__)
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 5.0
Entry = tuple[Operation, Outcome]
Job = Callable[[], Awaitable[None]]


class Outcomes:
    """Writes outcomes in batched commits, and keeps them in memory while the disk is full.

    Args:
        journal: the operation log.
        written: called with each outcome when it is durable.
        lost: called when another process has taken over the journal.
        unwritten: called before `written` with an operation that succeeded but is failed in the log, because its
            outcome cannot be written.

    Attributes:
        trouble: why nothing can be written at the moment.
    """

    def __init__(
        self,
        journal: Journal,
        written: Callable[[Operation, Outcome], None],
        lost: Callable[[str], None],
        unwritten: Callable[[Operation], None] = lambda operation: None,
    ) -> None:
        self._unwritten = unwritten
        self._journal = journal
        self._written = written
        self._lost = lost
        self._queue: deque[Entry | Job] = deque()
        self._batch: deque[Entry] = deque()  # outcomes that are written one by one
        self._unsettled: Counter[str] = Counter()  # outcomes that are not durable, by queue
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.trouble: str | None = None

    def start(self) -> None:
        """Start the task."""
        self._task = asyncio.create_task(self._run(), name="outcomes")

    def put(self, operation: Operation, outcome: Outcome) -> None:
        """Queue the outcome of an operation for writing."""
        self._queue.append((operation, outcome))
        self._unsettled[operation.queue_id] += 1
        self._wake.set()

    def settled(self, queue: str) -> bool:
        """Return whether all outcomes of a queue so far are durable."""
        return queue not in self._unsettled

    def _settle(self, operation: Operation) -> None:
        self._unsettled[operation.queue_id] -= 1
        if not self._unsettled[operation.queue_id]:
            del self._unsettled[operation.queue_id]

    def then(self, job: Job) -> None:
        """Run a job after everything queued so far is durable."""
        self._queue.append(job)
        self._wake.set()

    def withdraw(self, queue: str) -> list[Operation]:
        """Remove the unwritten results of a queue, and return their operations; failures stay."""
        withdrawn: list[Operation] = []
        for entries in (self._batch, self._queue):
            for entry in list(entries):
                if isinstance(entry, tuple) and entry[0].queue_id == queue and entry[1].error is None:
                    entries.remove(entry)
                    self._settle(entry[0])
                    withdrawn.append(entry[0])
        return withdrawn

    async def flush(self) -> None:
        """Wait until everything queued so far is durable."""
        if self._task is None or self._task.done():
            return
        reached = asyncio.get_running_loop().create_future()

        async def mark() -> None:
            if not reached.done():
                reached.set_result(None)

        self.then(mark)
        await asyncio.wait([reached, self._task], return_when=asyncio.FIRST_COMPLETED)

    async def stop(self, seconds: float) -> None:
        """Write what is left, for at most `seconds`, and end the task."""
        if self._task is None:
            return
        try:
            async with asyncio.timeout(seconds):
                await self.flush()
        except TimeoutError:
            _log.error(
                "the outcomes of %d operations were not written; the operations run again after the next start",
                len(self._queue),
            )
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._write()

    async def _write(self) -> None:
        while self._queue:
            batch: list[Entry] = []
            while self._queue and isinstance(entry := self._queue[0], tuple):
                batch.append(entry)
                self._queue.popleft()
            await self._finish(batch)
            if self._queue and not isinstance(job := self._queue[0], tuple):
                self._queue.popleft()
                await self._job(job)

    async def _finish(self, batch: list[Entry]) -> None:
        if not batch:
            return
        written = await self._persist(lambda: self._journal.finish([outcome for _, outcome in batch]))
        if written is None:
            await self._one_by_one(batch)
            return
        reach("outcomes.before_told")
        for (operation, _), outcome in zip(batch, written, strict=True):
            self._notify(operation, outcome)
        reach("outcomes.after_told")

    async def _one_by_one(self, batch: list[Entry]) -> None:
        self._batch.extend(batch)
        while self._batch:
            operation, outcome = self._batch.popleft()
            written = await self._persist(lambda outcome=outcome: self._journal.finish([outcome]))  # type: ignore[misc]
            if written is None:
                await self._fail(operation, outcome)
            else:
                self._notify(operation, written[0])

    async def _fail(self, operation: Operation, outcome: Outcome) -> None:
        """Fail an operation whose outcome cannot be written; if that fails too, only waiting clients learn of it."""
        failed = replace(
            outcome, result=None, error="the result could not be written", category="server", in_transaction=None
        )
        written = await self._persist(lambda: self._journal.finish([failed]))
        if outcome.error is None:
            self._unwritten(operation)
        self._notify(operation, failed if written is None else written[0])

    def _notify(self, operation: Operation, outcome: Outcome) -> None:
        self._settle(operation)
        try:
            self._written(operation, outcome)
        except Exception:
            _log.exception("the outcome of operation %d was written, but notifying its listeners failed", operation.id)

    async def _job(self, job: Job) -> None:
        async def run() -> list[Outcome]:
            await job()
            return []

        await self._persist(run)

    async def _persist(self, write: Callable[[], Awaitable[list[Outcome]]]) -> list[Outcome] | None:
        """Write until the store accepts it; return None if the data, not the store, is at fault."""
        pause = _FIRST_WAIT
        while True:
            try:
                written = await write()
            except LeaseLost as error:
                self.trouble = str(error)
                self._lost(str(error))
                raise asyncio.CancelledError from error  # this process must not write any more
            except (Busy, OSError) as error:
                if self.trouble is None:
                    _log.error("cannot write outcomes to the store; retrying: %s", error)
                self.trouble = str(error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_WAIT)
            except Exception:
                _log.exception("cannot write an outcome")
                return None
            else:
                self.trouble = None
                return written


_PLACES = ("snapshots", "checkpoints")


class Records(Protocol):
    """The part of the store that effects need."""

    @property
    def database(self) -> Database:
        """Runs transactions."""

    @property
    def models(self) -> Models:
        """See `store.models`."""

    @property
    def checkpoints(self) -> Checkpoints:
        """See `store.checkpoints`."""


class StoreEffects:
    """The `Effects` of `ports`, on the tables of the store.

    Args:
        data: the data folder.
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
            response = {"type": "load_weights", "model_id": operation.queue_id, "path": load.path}
            response |= orjson.loads(body) if load.native else {}
            return _json(operation, response, lambda connection: _adopt_task(connection, operation, load.path))
        if operation.kind == "unload":
            return self._unloaded(operation)
        return Outcome(operation.id, result=body, in_transaction=_marking(operation) if extra.get("embeds") else None)

    def _unloaded(self, operation: Operation) -> Outcome:
        def in_transaction(connection: Connection) -> None:
            with contextlib.suppress(NotFound):
                snapshot = models.get(connection, operation.tenant, operation.queue_id).snapshot
                models.set_status(
                    connection, operation.tenant, operation.queue_id, "gone", time.time(), "it was unloaded"
                )
                self._unwanted.extend([snapshot.folder] if snapshot else [])

        return _json(operation, {"type": "unload_model", "model_id": operation.queue_id}, in_transaction)

    async def unloaded(self) -> None:
        """See `ports.Effects`."""
        unwanted, self._unwanted = self._unwanted, []
        await self.remove(unwanted)

    async def closed(self, tenant: str, model: str) -> tuple[str, Category] | None:
        """See `ports.Effects`."""
        try:
            record = await self._store.models.get(tenant, model)
        except NotFound:
            return None
        if record.status == "gone":
            return f"this model no longer exists: {record.reason or 'it was unloaded'}", "user"
        if record.status == "corrupted":
            return record.reason or "this model cannot be restored", "server"
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
        checkpoints_by_kind = await self._store.checkpoints.latest(tenant, [model], time.time())
        newest = checkpoints_by_kind.get((model, "weights"))
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
    response: dict[str, Any] = {"type": "create_model", "model_id": operation.queue_id}
    if create.path is not None:
        response |= {"type": "load_weights", "path": create.path}

    def in_transaction(connection: Connection) -> None:
        with contextlib.suppress(NotFound):
            models.set_status(connection, operation.tenant, operation.queue_id, "live", time.time())
        if create.path is not None:
            _adopt_task(connection, operation, create.path)

    return _json(operation, response, in_transaction)


def _marking(operation: Operation) -> Callable[[Connection], None]:
    """Return what marks the model of an operation as trained for embeddings."""

    def in_transaction(connection: Connection) -> None:
        with contextlib.suppress(NotFound):
            models.mark_embedding(connection, operation.tenant, operation.queue_id)

    return in_transaction


def _adopt_task(connection: Connection, operation: Operation, path: str) -> None:
    """Mark a model as trained for embeddings if the checkpoint whose weights it has now is."""
    with contextlib.suppress(NotFound):
        parsed = CheckpointPath.parse(path)
        if embeds(checkpoints.get(connection, operation.tenant, parsed, time.time(), public=True).metadata):
            models.mark_embedding(connection, operation.tenant, operation.queue_id)


def _saved(operation: Operation, extra: dict[str, Any]) -> Outcome:
    save = Save.parse(_payload(operation))
    path = CheckpointPath(operation.queue_id, save.kind, save.name) if save.name is not None else None
    types = {"weights": "save_weights", "sampler_weights": "save_weights_for_sampler"}
    response: dict[str, Any] = {"type": types.get(save.kind, "save_weights_external")}
    if path is not None:
        response["path"] = str(path)
    if save.sampler is not None:
        response["sampling_session_id"] = save.sampler
    if save.kind == "external_weights":
        response["size_bytes"] = extra.get("size_bytes", 0)

    def in_transaction(connection: Connection) -> None:
        model, now = models.get(connection, operation.tenant, operation.queue_id), time.time()
        if save.name is not None:
            checkpoints.add(connection, _checkpoint(model, save, save.name, extra, now), save.overwrite)
        if save.sampler is not None:
            _add_sampler(connection, model, save, save.sampler, now)

    return _json(operation, response, in_transaction)


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
        has_optimizer=save.kind == "weights" and save.optimizer,
        metadata={**(EMBEDS if embeds(model.metadata) else {}), **(save.metadata or {})} or None,
        project=model.project,
    )


def _add_sampler(connection: Connection, model: Model, save: Save, sampler: str, now: float) -> None:
    session, _, number = sampler.rpartition(":sample:")
    record = Sampler(sampler, model.tenant, session, int(number), model.base, now, folder=save.folder)
    if save.inflight:
        record.inflight = model.id
    samplers.add(connection, record)
    if save.inflight:
        samplers.move_inflight(connection, model.tenant, model.id, save.folder)


def _payload(operation: Operation) -> bytes:
    if operation.payload is None:
        raise LookupError(f"the payload of operation {operation.id} is missing")
    return operation.payload


def _json(
    operation: Operation, response: dict[str, Any], in_transaction: Callable[[Any], None] | None = None
) -> Outcome:
    return Outcome(operation.id, result=orjson.dumps(response), in_transaction=in_transaction)
