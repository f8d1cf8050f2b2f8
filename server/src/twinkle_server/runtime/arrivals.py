"""Operations that come late, never, or are not wanted any more.

A missing number is not lost while its request is on its way or may come again (`Arrivals`). Operations end without the
engine when they are cancelled, given up behind a gap, or left behind by a session that ended (`Cancellation`).
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
from twinkle_server.operations import LOST, Operation, Outcome, Submission
from twinkle_server.ports import Journal
from twinkle_server.runtime.dispatch import Dispatcher
from twinkle_server.runtime.outcomes import Outcomes
from twinkle_server.runtime.queues import Gap, ModelQueue
from twinkle_server.settings import Times
from twinkle_server.tenancy.auth import Caller

_SLOW = 1.0  # seconds; a request that takes longer is a slow upload
_KEPT = 4096  # tenants


class Arrivals:
    """Watches requests that bring operations, from their headers to the start of their answer.

    Args:
        resend: seconds within which a client sends a request again that was answered with 408, 429 or 5xx, or that
            got no answer.
        clock: seconds, monotonic.
    """

    def __init__(self, resend: float, clock: Callable[[], float] = lambda: time.monotonic()) -> None:
        self._resend = resend
        self._clock = clock
        self._numbers = itertools.count()
        self._under_way: dict[str, dict[int, float]] = {}
        self._slow: dict[str, float] = {}
        self._again: dict[str, float] = {}
        self._everybody = float("-inf")

    def everybody_may_resend(self) -> None:
        """Note that the service was away, so that clients may be about to send again."""
        self._everybody = self._clock()

    @contextmanager
    def watch(self, tenant: str) -> Iterator[Callable[[int], None]]:
        """Watch one request of a tenant.

        Yields:
            A function that is told the status of the answer; a request that ends without one may come again.
        """
        number, begun = next(self._numbers), self._clock()
        self._under_way.setdefault(tenant, {})[number] = begun
        status = 0

        def answered(found: int) -> None:
            nonlocal status
            status = found

        try:
            yield answered
        finally:
            mine = self._under_way[tenant]
            del mine[number]
            if not mine:
                del self._under_way[tenant]
            now = self._clock()
            if now - begun > _SLOW:
                _note(self._slow, tenant, now)
            if status in (0, 408, 429) or status >= 500:
                _note(self._again, tenant, now)

    def expected_until(self, tenant: str, seconds: float) -> float:
        """Return until when a request of a tenant may still arrive, as far as the server can see; it may have passed.

        Args:
            tenant: whose.
            seconds: that a request may take on its way after another one of the tenant has arrived.
        """
        now = self._clock()
        begun = min(self._under_way.get(tenant, {}).values(), default=now)
        slow = now if now - begun > _SLOW else self._slow.get(tenant, float("-inf"))
        return max(
            slow + seconds, self._again.get(tenant, float("-inf")) + self._resend, self._everybody + self._resend
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
"""Paths of the requests that have a number in the queue of a model."""


class ArrivalMiddleware:
    """Lets `Arrivals` watch requests that have a number; the tenant must be known already.

    Args:
        app: what comes behind it.
        arrivals: watches.
    """

    def __init__(self, app: Any, arrivals: Arrivals) -> None:
        self._app = app
        self._arrivals = arrivals

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one connection."""
        who = scope.get("caller")
        if scope["type"] != "http" or scope["path"] not in OPERATIONS or not isinstance(who, Caller):
            await self._app(scope, receive, send)
            return
        with self._arrivals.watch(who.tenant) as answered:

            async def told(message: Any) -> None:
                if message["type"] == "http.response.start":
                    answered(message["status"])
                await send(message)

            await self._app(scope, receive, told)


_STOOD_STILL = 5.0
"""Seconds between two looks at the gaps, after which this process was stopped, or the machine slept."""


class Cancellation:
    """Ends operations.

    Args:
        dispatcher: has the queues.
        journal: the log.
        outcomes: writes.
        arrivals: which requests may still come.
        times: `gap_fail` and `gap_limit` count.
        farthest: numbers that may be missing before one that waits.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        journal: Journal,
        outcomes: Outcomes,
        arrivals: Arrivals,
        times: Times,
        farthest: int,
    ) -> None:
        self._farthest = farthest
        self._arrivals = arrivals
        self._times = times
        self._dispatcher = dispatcher
        self._journal = journal
        self._outcomes = outcomes
        self._looked = time.monotonic()

    def cancel(self, operation: Operation) -> None:
        """Drop an operation that was not sent to the engine yet, or that samples; others run to their end."""
        queue = self._dispatcher.queues.get(operation.queue_id)
        if queue is None:
            return
        if operation.id in queue.in_flight:
            if operation.kind != "sample":
                return
            self._dispatcher.land(operation.id)
            self._dispatcher.tell(Message(messages.CANCEL, {"id": operation.id}))
        elif not queue.withdraw(operation):
            return  # its outcome is being written
        outcome = Outcome(operation.id, error="it was cancelled", category="user", cancelled=True)
        self._outcomes.put(operation, outcome)
        self._dispatcher.kick(queue)
        self._dispatcher.release(queue)

    def leave(self, prefix: str, reason: str) -> None:
        """Let go of the queues whose names begin so: what waits fails, what runs ends, and models are snapshotted."""
        for queue in [queue for name, queue in self._dispatcher.queues.items() if name.startswith(prefix)]:
            for operation in queue.order.drop_all():
                self._dispatcher.fail(operation, reason, "user")
            queue.leave()
            self._dispatcher.release(queue)

    async def give_up_gaps(self) -> None:
        """Fail what has waited too long for a number that never came, and let later ones run."""
        if time.monotonic() - self._looked > max(_STOOD_STILL, self._times.gap_fail / 2):
            self._arrivals.everybody_may_resend()  # what was sent while this process stood still is still to be read
        self._looked = time.monotonic()
        for queue in list(self._dispatcher.queues.values()):
            for operation in queue.order.drop_far(self._farthest):  # submissions so far away were taken once
                self._dispatcher.fail(
                    operation, f"sequence number {operation.number} is too far above the previous ones", "user"
                )
            gap, now = queue.order.gap(), time.monotonic()
            if gap is not None and now >= self._lost_at(queue, gap):
                await self._give_up(queue, now - gap.since)

    def _lost_at(self, queue: ModelQueue, gap: Gap) -> float:
        """Return when a missing number counts as lost, as far as can be known now."""
        times = self._times
        expected = max(gap.since + times.gap_fail, self._arrivals.expected_until(queue.tenant, times.gap_fail))
        return min(expected, gap.since + times.gap_limit)

    async def _give_up(self, queue: ModelQueue, seconds: float) -> None:
        if not (missing := queue.order.missing()):
            return
        reason = f"number {missing[0]} of this model did not arrive within {seconds:.0f} s"
        refused = [_lost(queue, number, seconds) for number in missing]
        try:  # together, so that they share commits
            await asyncio.shield(asyncio.gather(*map(self._journal.submit, refused)))
        except SequenceConflict:
            return  # it came at last
        if queue.order.missing() != missing:
            return
        for operation in queue.order.give_up():
            self._dispatcher.fail(
                operation,
                f"cannot run sequence number {operation.number} out of order: {reason} (a request that fails in the "
                "client uses up its number); send this request again with the next number",
                "user",
            )
        self._dispatcher.kick(queue)
        self._dispatcher.release(queue)


def _lost(queue: ModelQueue, number: int, seconds: float) -> Submission:
    """Return what is written for a number that never came; its request, if it comes later, is answered with this."""
    reason = (
        f"cannot run sequence number {number} of this model: it did not arrive within {seconds:.0f} s after a later "
        "one, which was failed for that; nothing was computed; send this request again under the next number"
    )
    return Submission(queue.tenant, queue.name, "forward", b"", number, refusal=reason, asked=LOST)
