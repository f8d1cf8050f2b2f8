"""Sessions of clients: heartbeats, expiry, and release of their models."""

import logging
import time
from typing import Protocol

from twinkle_server.ports import Effects
from twinkle_server.runtime.arrivals import Cancellation
from twinkle_server.runtime.dispatch import Dispatcher
from twinkle_server.runtime.queues import Closed
from twinkle_server.settings import Times
from twinkle_server.store.models import Models
from twinkle_server.store.sessions import Sessions


class Heartbeats:
    """Caches active sessions and writes their heartbeats in batches.

    Every end of a session must call `forget`. Heartbeats that a crash loses do no harm: after a start, no session
    expires before it had time to send one.

    Args:
        sessions: their table.
    """

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._active: dict[str, str] = {}
        self._unwritten: dict[str, float] = {}
        self._ended = 0

    async def hear(self, tenant: str, session: str) -> None:
        """Record a heartbeat.

        Raises:
            Gone: the tenant has no such session, or it has ended.
        """
        if self._active.get(session) == tenant:
            self._unwritten[session] = time.time()
            return
        ended = self._ended
        await self._sessions.heartbeat(tenant, session, time.time())
        if ended == self._ended:  # otherwise this session may have ended meanwhile
            self._active[session] = tenant

    def forget(self, session: str) -> None:
        """Drop an ended session from the cache."""
        self._ended += 1
        self._active.pop(session, None)
        self._unwritten.pop(session, None)

    async def write(self) -> None:
        """Write the pending heartbeats."""
        heard, self._unwritten = self._unwritten, {}
        if not heard:
            return
        try:
            await self._sessions.heard([(self._active[session], session, at) for session, at in heard.items()])
        except BaseException:
            self._unwritten = {name: at for name, at in heard.items() if name in self._active} | self._unwritten
            raise

    def since_written(self, session: str) -> bool:
        """Return whether a heartbeat arrived after the last `write` began."""
        return session in self._unwritten


_log = logging.getLogger(__name__)
_MISSED = 3
"""Intervals between two checks for expired sessions from which on this process counts as having been stopped."""


def check_interval(times: Times) -> float:
    """Return the seconds between two checks for expired sessions."""
    return min(10.0, times.session / 4)


class Tables(Protocol):
    """The part of the store that sessions need."""

    @property
    def sessions(self) -> Sessions:
        """See `store.sessions`."""

    @property
    def models(self) -> Models:
        """See `store.models`."""


class SessionKeeper:
    """Expires sessions and releases their models.

    Args:
        store: their tables.
        dispatcher: the queues.
        cancellation: fails waiting operations.
        effects: sets the status of models.
        times: the settings `session` and `kept_run` are used.
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
        self._since = self._last_check = time.time()

    async def heartbeat(self, session: str, tenant: str) -> None:
        """Record a heartbeat of a session.

        Raises:
            Gone: the tenant has no such session, or it has finished or expired.
        """
        await self._heartbeats.hear(tenant, session)

    def finish(self, session: str) -> None:
        """Release the queues of a finished session."""
        self._heartbeats.forget(session)
        self._cancellation.leave(f"{session}:", "its session was finished")

    async def expire(self) -> None:
        """End sessions without a recent heartbeat, unless one of their operations runs."""
        await self._heartbeats.write()
        now = time.time()
        if abs(now - self._last_check) > _MISSED * check_interval(self._times):
            self._since = now  # this process was stopped, or the clock was set; several short times add up, too
        self._last_check = now
        if now - self._since < self._times.session:
            return  # heartbeats could not arrive while this process did not run
        for session in await self._store.sessions.silent(now - self._times.session):
            if self._runs(session.id) or self._heartbeats.since_written(session.id):
                continue
            if await self._store.sessions.end(session.tenant, session.id, "expired", now, "expired"):
                _log.info("session %s expired", session.id)
                self._heartbeats.forget(session.id)
                self._cancellation.leave(f"{session.id}:", "the session expired: no heartbeat received")

    def _runs(self, session: str) -> bool:
        queues = self._dispatcher.queues.items()
        return any(queue.running for name, queue in queues if name.startswith(f"{session}:"))

    async def settle(self) -> None:
        """Detach models whose session has ended, and delete detached models after `kept_run`."""
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
        reason = f"it was not used for {self._times.kept_run / 86400:.3g} days"
        if queue is not None:
            self._dispatcher.close(queue, Closed(f"this model no longer exists: {reason}"))
        await self._effects.gone(tenant, model, reason)
