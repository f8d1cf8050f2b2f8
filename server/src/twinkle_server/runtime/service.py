"""The service with its tables, as run by `serve`."""

import contextlib
import logging
import time
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.dialects import sqlite

from twinkle_server.checkpoints.upkeep import Upkeep
from twinkle_server.errors import Busy, ServiceError
from twinkle_server.ports import Figures, Tracer
from twinkle_server.runtime.core import Runtime
from twinkle_server.runtime.exclusive import ExclusiveModel
from twinkle_server.runtime.outcomes import StoreEffects
from twinkle_server.runtime.recorded_rollouts import RolloutBuffer
from twinkle_server.runtime.sessions import SessionKeeper, check_interval
from twinkle_server.runtime.supervision import StartChild
from twinkle_server.settings import Settings
from twinkle_server.store.opening import Store
from twinkle_server.store.tables import meta
from twinkle_server.telemetry.status import read_figures
from twinkle_server.tenancy.quotas import rollouts_of, weights_of

_log = logging.getLogger(__name__)
_PURGE, _PROBE, _ROOM, _WEIGHTS, _FOLD, _OLD = 60.0, 1.0, 10.0, 2.0, 10.0, 300.0  # intervals in seconds


class Service(Runtime):
    """The `Service` of `ports`, on an open data folder.

    Args:
        settings: of the service.
        store: an open store that holds the lease.
        figures: metrics; None disables them.
        start_child: starts an engine; None starts a process.
        tracer: follows operations; None disables traces.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        figures: Figures | None = None,
        start_child: StartChild | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        effects = StoreEffects(settings.data, store)
        super().__init__(settings, store.journal, effects, start_child, figures, tracer)
        self._store = store
        self.runtime_status.store_works = lambda: store.database.healthy
        self._sessions = SessionKeeper(store, self.dispatcher, self.cancellation, effects, settings.times)
        kept = settings.times.trash
        self._upkeep = Upkeep(settings.data, store.database, store.checkpoints, store.keys, store.retention, kept)
        self._upkeep.held = lambda: self.unrecorded
        self._exclusive = ExclusiveModel(store.models)
        self._rollouts = RolloutBuffer(store.rollouts, settings.rollouts, store.sessions, self._rollout_limits)
        self.record_rollouts = self._rollouts.add

    async def start(self) -> None:
        """Resume pending operations and start the engine; return before it is ready (see `wait_ready`)."""
        await self._upkeep.restore_named()
        await self._store.models.end_failed_creations()
        if retried := await self._store.models.retry_corrupted(time.time()):
            _log.warning(
                "%d models could not be restored at an earlier start; trying again from their stored state", retried
            )
        await self._exclusive.resume()
        await self._weigh()
        self.janitor.add("weights of keys", _WEIGHTS, self._weigh)
        times = self._settings.times
        every = check_interval(times)
        self.janitor.add("session expiry", every, self._sessions.expire)
        self.janitor.add("models of ended sessions", max(every, min(60.0, times.session)), self._sessions.settle)
        self.janitor.add("retention", min(_PURGE, max(1.0, times.read_result)), self._purge)
        self.janitor.add("checkpoint upkeep", times.upkeep, self._upkeep.run)
        self.janitor.add("disk space", _ROOM, self._upkeep.make_room)
        self.janitor.add("disk probe", _PROBE, self._probe)
        self.janitor.add("rollouts", _PROBE, self._rollouts.flush)
        self.janitor.add("figures", _FOLD, self._store.figures.fold)
        self.janitor.add("old figures", _OLD, self._forget_figures)
        await super().start()

    async def heartbeat(self, session: str, tenant: str) -> None:
        """Record a heartbeat of a session.

        Raises:
            Gone: the tenant has no such session, or it has finished or expired.
        """
        await self._sessions.heartbeat(session, tenant)

    async def finish_session(self, session: str) -> None:
        """Snapshot and free the models of a finished session, and fail what waits in its queues."""
        self._sessions.finish(session)

    async def check_access(self, tenant: str) -> None:
        """Refuse new work of a tenant while a full-parameter model of another has the service.

        Raises:
            Locked: it has.
        """
        await self._exclusive.check(tenant)

    async def reserve(self, tenant: str, model: str) -> None:
        """Reserve the service for a full-parameter model.

        Raises:
            Locked: another has it, or other tenants have models in use.
        """
        await self._exclusive.reserve(tenant, model)

    async def status(self) -> dict[str, Any]:
        """Return the current figures of the service and of the database."""
        figures = {**await super().status(), **await read_figures(self._store.database)}
        return {**figures, **await self._upkeep.figures()}

    async def _weigh(self) -> None:
        """Tell the engine the weights of the tenants' keys, which may change at any time."""
        if self._settings.auth:
            self.dispatcher.weigh(weights_of(await self._store.keys.all()))

    async def _rollout_limits(self) -> dict[str, int]:
        """Return how many rows of a run are recorded of tenants whose keys limit it."""
        return rollouts_of(await self._store.keys.all(revoked=True)) if self._settings.auth else {}

    async def _probe(self) -> None:
        """Write a row if the last commit failed, because `/readyz` may keep all other writers away."""
        if not self._store.database.healthy:
            with contextlib.suppress(Busy):
                await self._store.database.write(_note_probe)

    async def close(self) -> None:
        """Stop the engine and all tasks; the next service on this log resumes what is pending."""
        await super().close()
        with contextlib.suppress(ServiceError):  # the disk is full: rollouts are not worth waiting for
            await self._rollouts.flush()

    async def _forget_figures(self) -> None:
        now, times = time.time(), self._settings.times
        await self._store.figures.forget(now - times.kept_figures)
        await self._rollouts.trim(now - times.kept_rollouts)

    async def _purge(self) -> None:
        await self._store.retention.purge(time.time())
        await self._store.audit.forget(time.time() - self._settings.times.kept_audit)
        self.futures.forget_recent()


def _note_probe(connection: Connection) -> None:
    new = sqlite.insert(meta).values(name="probe", value=str(time.time()))
    connection.execute(new.on_conflict_do_update(index_elements=["name"], set_={"value": new.excluded.value}))
