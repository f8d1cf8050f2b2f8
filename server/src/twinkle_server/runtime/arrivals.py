"""Operations that arrive late or never, and operations that are cancelled.

A missing sequence number is not lost while its request is being received or may be sent again (`Arrivals`).
`Cancellation` ends operations without the engine: cancelled ones, those behind a gap that was given up, and those of
ended sessions.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from twinkle_server.engine import messages
from twinkle_server.engine.messages import Message
from twinkle_server.errors import SequenceConflict
from twinkle_server.operations import LOST, Operation, Submission
from twinkle_server.ports import Journal
from twinkle_server.runtime.dispatch import Dispatcher
from twinkle_server.runtime.queues import Gap, InFlight, ModelQueue
from twinkle_server.settings import Times
from twinkle_server.tenancy.auth import Caller

_SLOW = 1.0  # seconds; a request that takes longer is a slow upload
_KEPT = 4096  # tenants


class Arrivals:
    """Tracks requests that carry operations, from their headers to the start of the response.

    Args:
        resend: seconds within which a client repeats a request that was answered with 408, 429 or 5xx, or not at all.
        clock: returns seconds, monotonic.
    """

    def __init__(self, resend: float, clock: Callable[[], float] = lambda: time.monotonic()) -> None:
        self._resend = resend
        self._clock = clock
        self._numbers = itertools.count()
        self._active: dict[str, dict[int, float]] = {}
        self._slow: dict[str, float] = {}
        self._again: dict[str, float] = {}
        self._restarted = float("-inf")

    def expect_resends(self) -> None:
        """Note that the service was stopped, so that clients may repeat requests."""
        self._restarted = self._clock()

    @contextmanager
    def watch(self, tenant: str) -> Iterator[Callable[[int], None]]:
        """Track one request of a tenant.

        Yields:
            A function to call with the status of the response; a request without a response may be repeated.
        """
        number, begun = next(self._numbers), self._clock()
        self._active.setdefault(tenant, {})[number] = begun
        status = 0

        def answered(code: int) -> None:
            nonlocal status
            status = code

        try:
            yield answered
        finally:
            active = self._active[tenant]
            del active[number]
            if not active:
                del self._active[tenant]
            now = self._clock()
            if now - begun > _SLOW:
                _note(self._slow, tenant, now)
            if status in (0, 408, 429) or status >= 500:
                _note(self._again, tenant, now)

    def expected_until(self, tenant: str, seconds: float) -> float:
        """Return the time until which a request of a tenant may still arrive; it may be in the past.

        Args:
            tenant: the tenant.
            seconds: how much later than another request of the tenant it may arrive.
        """
        now = self._clock()
        begun = min(self._active.get(tenant, {}).values(), default=now)
        slow = now if now - begun > _SLOW else self._slow.get(tenant, float("-inf"))
        return max(
            slow + seconds, self._again.get(tenant, float("-inf")) + self._resend, self._restarted + self._resend
        )


def _note(times: dict[str, float], tenant: str, now: float) -> None:
    times.pop(tenant, None)
    times[tenant] = now
    while len(times) > _KEPT:
        times.pop(next(iter(times)))


OPERATIONS = frozenset(
    f"/api/v1/{name}"
    for name in (
        "forward",
        "forward_backward",
        "load_weights",
        "optim_step",
        "save_weights",
        "save_weights_external",
        "save_weights_for_sampler",
    )
)
"""Paths of the requests of the Tinker protocol that carry a sequence number of a model."""
_NATIVE = "/twinkle/models/"


def carries_number(path: str) -> bool:
    """Return whether requests of a path carry a sequence number of a model."""
    return path in OPERATIONS or path.startswith(_NATIVE)


class ArrivalMiddleware:
    """Tracks requests with sequence numbers in `Arrivals`; runs after authentication.

    Args:
        app: the next application.
        arrivals: tracks the requests.
    """

    def __init__(self, app: Any, arrivals: Arrivals) -> None:
        self._app = app
        self._arrivals = arrivals

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one connection."""
        caller = scope.get("caller")
        if scope["type"] != "http" or not carries_number(scope["path"]) or not isinstance(caller, Caller):
            await self._app(scope, receive, send)
            return
        with self._arrivals.watch(caller.tenant) as answered:

            async def observe(message: Any) -> None:
                if message["type"] == "http.response.start":
                    answered(message["status"])
                await send(message)

            await self._app(scope, receive, observe)


_SUSPENDED = 5.0
"""Seconds between two checks of the gaps from which on this process counts as having been suspended."""


class Cancellation:
    """Ends operations without the engine.

    Args:
        dispatcher: the queues.
        journal: the operation log.
        arrivals: tells which requests may still arrive.
        times: the settings `gap_fail` and `gap_limit` are used.
        farthest: maximum number of missing sequence numbers before a waiting operation.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        journal: Journal,
        arrivals: Arrivals,
        times: Times,
        farthest: int,
    ) -> None:
        self._farthest = farthest
        self._arrivals = arrivals
        self._times = times
        self._dispatcher = dispatcher
        self._journal = journal
        self._last_check = time.monotonic()

    def cancel(self, *operations: Operation) -> "list[asyncio.Future[bool]]":
        """Cancel operations that have not begun, and sampling requests; others run to their end.

        Returns:
            For each, whether it is cancelled. This is known at once, except where the engine has the operation and must
            take it out again.
        """
        flights: dict[int, InFlight] = {}
        known: dict[int, bool] = {}
        for operation in reversed(operations):  # the last first: the earlier ones must not start meanwhile
            queue = self._dispatcher.queues.get(operation.queue_id)
            flight = None if queue is None else queue.in_flight.get(operation.id)
            if flight is None or operation.kind == "sample":
                known[operation.id] = queue is not None and self._end(queue, operation)
            elif flight.replay:
                known[operation.id] = False
            else:
                flights[operation.id] = flight
        answers = dict(zip(flights, self._dispatcher.withdraw(list(flights.values())), strict=True))
        return [answers.get(each.id) or _known(known[each.id]) for each in operations]

    def _end(self, queue: ModelQueue, operation: Operation) -> bool:
        """Cancel an operation that was not sent to the engine, or a sampling request; return False if it has ended."""
        if operation.id in queue.in_flight:
            self._dispatcher.pop_in_flight(operation.id)
            self._dispatcher.send_order(Message(messages.CANCEL, {"id": operation.id}))
        elif not queue.withdraw(operation):
            return False  # its outcome is being written
        self._dispatcher.cancel(operation)
        self._dispatcher.send_ready(queue)
        self._dispatcher.release(queue)
        return True

    def leave(self, prefix: str, reason: str) -> None:
        """Release the queues whose names start with `prefix`: waiting operations fail, running ones end."""
        for queue in [queue for name, queue in self._dispatcher.queues.items() if name.startswith(prefix)]:
            for operation in queue.order.drop_all():
                self._dispatcher.fail(operation, reason, "user")
            queue.leave()
            self._dispatcher.release(queue)

    async def give_up_gaps(self) -> None:
        """Fail operations that have waited too long for a missing number, and let later ones run."""
        if time.monotonic() - self._last_check > max(_SUSPENDED, self._times.gap_fail / 2):
            self._arrivals.expect_resends()  # requests sent while this process was suspended are not read yet
        self._last_check = time.monotonic()
        for queue in list(self._dispatcher.queues.values()):
            for operation in queue.order.drop_far(self._farthest):  # logs of older releases may contain such numbers
                self._dispatcher.fail(
                    operation, f"sequence number {operation.number} is too far above the previous ones", "user"
                )
            gap, now = queue.order.gap(), time.monotonic()
            if gap is not None and now >= self._lost_at(queue, gap):
                await self._give_up(queue, now - gap.since)

    def _lost_at(self, queue: ModelQueue, gap: Gap) -> float:
        """Return when a missing number counts as lost, from what is known now."""
        times = self._times
        expected = max(gap.since + times.gap_fail, self._arrivals.expected_until(queue.tenant, times.gap_fail))
        return min(expected, gap.since + times.gap_limit)

    async def _give_up(self, queue: ModelQueue, seconds: float) -> None:
        if not (missing := queue.order.missing()):
            return
        reason = f"number {missing[0]} of this model did not arrive within {seconds:.0f} s"
        refused = [_lost(queue, number, seconds) for number in missing]
        try:  # concurrently, so that they share commits
            await asyncio.shield(asyncio.gather(*map(self._journal.submit, refused)))
        except SequenceConflict:
            return  # the missing request arrived
        if queue.order.missing() != missing:
            return
        for operation in queue.order.give_up():
            self._dispatcher.fail(
                operation,
                f"cannot run sequence number {operation.number} out of order: {reason} (a request that fails in the "
                "client uses up its number); send this request again with the next number",
                "user",
            )
        self._dispatcher.send_ready(queue)
        self._dispatcher.release(queue)


def _known(cancelled: bool) -> "asyncio.Future[bool]":
    future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    future.set_result(cancelled)
    return future


def _lost(queue: ModelQueue, number: int, seconds: float) -> Submission:
    """Return the failure recorded for a missing number; its request, if it arrives later, is answered with it."""
    reason = (
        f"cannot run sequence number {number} of this model: it did not arrive within {seconds:.0f} s after a later "
        "one, which was failed for that; nothing was computed; send this request again under the next number"
    )
    return Submission(queue.tenant, queue.name, "forward", b"", number, refusal=reason, original=LOST)
