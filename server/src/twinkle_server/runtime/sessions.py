"""Sessions end when their clients say so or fall silent; their models leave the engine and are kept a while."""

import logging
import time
from typing import Protocol

from twinkle_server.ports import Effects
from twinkle_server.runtime.cancellation import Cancellation
from twinkle_server.runtime.dispatch import Dispatcher
from twinkle_server.runtime.heartbeats import Heartbeats
from twinkle_server.runtime.queues import Closed
from twinkle_server.settings import Times
from twinkle_server.store.models import Models
from twinkle_server.store.sessions import Sessions

_log = logging.getLogger(__name__)


class Tables(Protocol):
    """The store, as sessions need it."""

    @property
    def sessions(self) -> Sessions:
        """See `store.sessions`."""

    @property
    def models(self) -> Models:
        """See `store.models`."""


class SessionKeeper:
    """Watches the sessions.

    Args:
        store: their tables.
        dispatcher: has the queues.
        cancellation: lets go of them.
        effects: says what became of models.
        times: `session` and `kept_run` count.
    """

    def __init__(
        self, store: Tables, dispatcher: Dispatcher, cancellation: Cancellation, effects: Effects, times: Times
    ) -> None:
        self._store = store
        self._dispatcher = dispatcher
        self._cancellation = cancellation
        self._effects = effects
        self._times = times
        self._heartbeats = Heartbeats(store.sessions)
        self._since = self._looked = time.time()

    async def heartbeat(self, session: str, tenant: str) -> None:
        """Hear of a session.

        Raises:
            Gone: it is unknown, another tenant's, finished or expired.
        """
        await self._heartbeats.hear(tenant, session)

    def finish(self, session: str) -> None:
        """Let go of what a session has."""
        self._heartbeats.forget(session)
        self._cancellation.leave(f"{session}:", "its session was finished")

    async def expire(self) -> None:
        """End the sessions that were silent too long, unless something of them runs."""
        await self._heartbeats.write()
        now = time.time()
        if abs(now - self._looked) > self._times.session:
            self._since = now  # this process stood still, or the clock was set
        self._looked = now
        if now - self._since < self._times.session:
            return  # nobody could be heard while this process was not there
        for session in await self._store.sessions.silent(now - self._times.session):
            if self._runs(session.id) or self._heartbeats.since_written(session.id):
                continue
            if await self._store.sessions.end(session.tenant, session.id, "expired", now, "expired"):
                _log.info("session %s expired", session.id)
                self._heartbeats.forget(session.id)
                self._cancellation.leave(f"{session.id}:", "its session expired: no heartbeat came")

    def _runs(self, session: str) -> bool:
        queues = self._dispatcher.queues.items()
        return any(queue.running for name, queue in queues if name.startswith(f"{session}:"))

    async def settle(self) -> None:
        """Detach models whose session has ended, whatever came between, and forget those that were kept long enough."""
        active = {session.id for session in await self._store.sessions.all_active()}
        for model in await self._store.models.with_status("live", "creating"):
            if model.session not in active:
                await self._settle(model.id, model.tenant)
        before = time.time() - self._times.kept_run
        for model in await self._store.models.with_status("detached", "corrupted", before=before):
            await self._forget(model.id, model.tenant)

    async def _settle(self, model: str, tenant: str) -> None:
        queue = self._dispatcher.queues.get(model)
        if queue is not None and not queue.idle:
            queue.leave()
            self._dispatcher.release(queue)
        else:
            await self._effects.detached(tenant, model)

    async def _forget(self, model: str, tenant: str) -> None:
        queue = self._dispatcher.queues.get(model)
        if queue is not None and queue.running:
            return
        reason = f"nothing was asked of it for {self._times.kept_run / 86400:.3g} days"
        if queue is not None:
            self._dispatcher.close(queue, Closed(f"this model is gone: {reason}"))
        await self._effects.gone(tenant, model, reason)
