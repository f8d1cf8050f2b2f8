"""The service as a key may use it: whatever is new passes the key's quotas, in the transaction that writes it."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from twinkle_server.errors import Forbidden
from twinkle_server.operations import Accepted, ModelInfo, Submission
from twinkle_server.ports import Service
from twinkle_server.telemetry.operations import ASKED, log_taken, names
from twinkle_server.tenancy.auth import CURRENT, Caller
from twinkle_server.tenancy.quotas import Meter, check_room

Also = Callable[[Any], None]


class Limited:
    """Stands in front of a service; see `ports.Service`.

    A request that came before and comes again is never refused here: it was let in already.

    Args:
        service: the one behind.
        meter: compares with quotas.
    """

    def __init__(self, service: Service, meter: Meter) -> None:
        self._service = service
        self._meter = meter
        self.wait = service.wait
        self.cancel = service.cancel
        self.queue_state = service.queue_state
        self.finish_session = service.finish_session
        self.heartbeat = service.heartbeat
        self.awaited = service.awaited
        self.submit_next = service.submit_next  # unload, which gives back

    @property
    def info(self) -> ModelInfo:
        """The base model."""
        return self._service.info

    async def submit(self, submission: Submission, also: Also | None = None) -> Accepted:
        """Submit an operation; what can never be done becomes a refusal, because its number must be used up.

        Raises:
            Busy: the key asks for too much at once.
            Forbidden: the key has no room for another model.
        """
        ASKED.set(names(submission))
        accepted = await self._admitted(submission, also)
        log_taken(submission, accepted)
        return accepted

    async def _admitted(self, submission: Submission, also: Also | None) -> Accepted:
        if submission.refusal is not None:
            return await self._refused(submission)
        caller = CURRENT.get()
        if caller is None or not caller.quotas or submission.kind == "unload":
            return await self._service.submit(submission, also)
        try:
            accepted = await self._service.submit(submission, self._guarded(caller, submission, also))
        except Forbidden as error:
            if submission.kind == "create":
                raise
            return await self._refused(replace(submission, refusal=error.message))
        if accepted.fresh:
            self._meter.charge(caller, submission.tokens)
        return accepted

    async def _refused(self, submission: Submission) -> Accepted:
        """Write an operation that fails; others may wait for its number, and then it is never too many."""
        verdict = None if self._service.awaited(submission) else self._meter.refusals(submission.tenant)
        if verdict is not None:
            raise verdict
        accepted = await self._service.submit(submission)
        if accepted.fresh:
            self._meter.refused(submission.tenant)
        return accepted

    def _guarded(self, caller: Caller, submission: Submission, also: Also | None) -> Also:
        verdict = None if self._service.awaited(submission) else self._meter.verdict(caller)

        def guarded(connection: Any) -> None:
            if verdict is not None:
                raise verdict
            check_room(connection, caller, submission.kind, time.time())
            if also is not None:
                also(connection)

        return guarded
