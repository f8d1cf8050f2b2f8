"""The service as a key may use it: whatever is submitted passes its quotas first."""

from collections.abc import Callable
from typing import Any

from twinkle_server.operations import Accepted, ModelInfo, Submission
from twinkle_server.runtime.ports import Service
from twinkle_server.tenancy.auth import CURRENT
from twinkle_server.tenancy.quotas import Meter


class Limited:
    """Stands in front of a service; see `runtime.ports.Service`."""

    def __init__(self, service: Service, meter: Meter) -> None:
        self._service = service
        self._meter = meter
        self.wait = service.wait
        self.cancel = service.cancel
        self.queue_state = service.queue_state
        self.finish_session = service.finish_session
        self.heartbeat = service.heartbeat

    @property
    def info(self) -> ModelInfo:
        """The base model."""
        return self._service.info

    async def submit(self, submission: Submission, also: Callable[[Any], None] | None = None) -> Accepted:
        """Submit an operation; a refusal passes, because its number must be used up.

        Raises:
            Busy: the key asks for too much at once.
            Forbidden: the key has no room for it.
        """
        return await self._admit(submission, lambda: self._service.submit(submission, also))

    async def submit_next(self, submission: Submission) -> Accepted:
        """Submit under the lane's next free number."""
        return await self._admit(submission, lambda: self._service.submit_next(submission))

    async def _admit(self, submission: Submission, submit: Callable[[], Any]) -> Accepted:
        caller = CURRENT.get()
        limited = caller is not None and submission.refusal is None and submission.kind != "unload"
        if caller is not None and limited:
            await self._meter.check(caller, submission.kind)
        accepted: Accepted = await submit()
        if caller is not None and limited and accepted.fresh:
            self._meter.charge(caller, submission.tokens)
        return accepted
