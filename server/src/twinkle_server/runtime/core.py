"""The running service without its tables: operations go into the log, through the engine, and come back as futures.

`EngineEvents` takes the engine's messages about models: results are written, and queues go on, close, or are released.
`Janitor` does what must be looked after from time to time; each chore fails for itself, and is done again in its turn.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import orjson

from twinkle_server.engine import messages
from twinkle_server.engine.messages import Message
from twinkle_server.errors import Busy, LeaseLost, Unavailable, Unprocessable
from twinkle_server.operations import Accepted, Future, ModelInfo, Operation, Outcome, Save, Snapshot, Submission
from twinkle_server.ports import Effects, Figures, Journal
from twinkle_server.runtime.arrivals import Arrivals, Cancellation
from twinkle_server.runtime.dispatch import NEVER_CREATED, Dispatcher
from twinkle_server.runtime.futures import Futures
from twinkle_server.runtime.outcomes import Outcomes
from twinkle_server.runtime.queues import MAX_GAP, Closed, ModelQueue, State
from twinkle_server.runtime.status import RuntimeStatus, count_death, count_message, ending_of
from twinkle_server.runtime.supervision import Child, ChildProcess, StartChild, Supervisor
from twinkle_server.settings import Settings
from twinkle_server.telemetry.logs import REQUEST, log_ended

_log = logging.getLogger(__name__)
_WINDOW = 64 * 2**20
_AGAIN = 1.0  # seconds
_KEPT = 1024  # operations whose payloads may wait in memory
_LAST_WORDS = 5.0  # seconds for outcomes that are still to be written at the end


class Runtime:
    """The `Service` of `ports`, over any journal and any engine.

    Attributes:
        info: the base model, as the engine found it.
        arrivals: is told which requests are on their way.
        lost: set when another process owns the data directory; this one has to end.
        queue_state: see `RuntimeStatus.queue_state`.
        ready: see `RuntimeStatus.ready`.

    Args:
        settings: of the service.
        journal: the log.
        effects: the rest of the store.
        start_child: starts an engine.
        figures: counts; None counts nothing.
    """

    def __init__(
        self,
        settings: Settings,
        journal: Journal,
        effects: Effects,
        start_child: StartChild | None = None,
        figures: Figures | None = None,
    ) -> None:
        self.info = ModelInfo(settings.served_name, 0, 0)
        self.lost = asyncio.Event()
        self._settings = settings
        self._journal = journal
        self._effects = effects
        self._figures = figures
        self._taking: set[asyncio.Task[Any]] = set()
        self.futures = Futures(journal, each=settings.limits.queued)
        self.outcomes = Outcomes(journal, self._written, self._lease_lost, self._unwritten)
        replayed = (lambda: None) if figures is None else figures.replayed
        self.dispatcher = Dispatcher(journal, self.outcomes, effects, _WINDOW, self.futures.open, replayed)
        self._max_gap = max(MAX_GAP, settings.limits.queued)
        self.arrivals = Arrivals(settings.times.resend)
        self.cancellation = Cancellation(
            self.dispatcher, journal, self.outcomes, self.arrivals, settings.times, self._max_gap
        )
        self.janitor = Janitor()
        self._events = EngineEvents(self.dispatcher, journal, self.outcomes, effects)
        self.supervisor = Supervisor(start_child or _starter(settings), self, settings.times)
        self.runtime_status = RuntimeStatus(
            self.futures, self.outcomes, self.dispatcher, self.supervisor, settings.times.gap_pause, lambda: self.info
        )
        self.queue_state, self.ready = self.runtime_status.queue_state, self.runtime_status.ready
        if figures is not None:
            self.runtime_status.show(figures)

    # the life of the service

    async def start(self) -> None:
        """Take up what was left behind, and start the engine; returns before it is ready (`wait_ready`)."""
        self.outcomes.start()
        self.supervisor.start().add_done_callback(self._end_with_the_engine)
        try:
            await self._take_up_all()
        except BaseException:
            await self.close()
            raise
        times = self._settings.times
        self.janitor.add("gaps", min(1.0, times.gap_fail / 4), self.cancellation.give_up_gaps)
        self.janitor.add("idle queues", 10.0, self._drop_idle)
        self.janitor.start()

    async def _take_up_all(self) -> None:
        left_behind = await self._journal.pending()
        if left_behind:
            self.arrivals.everybody_may_resend()
        for operation in left_behind:
            queue = await self.dispatcher.queue(operation.queue_id, operation.tenant, operation.ordered)
            if not queue.ordered:
                self.futures.open(operation)
                self.dispatcher.arrive(queue, operation)
            elif operation.number <= queue.snapshot_number:  # its outcome was never written, and a snapshot contains it
                self.futures.open(operation)
                self.dispatcher.fail(operation, "the result could not be written")

    async def wait_ready(self) -> None:
        """Wait until the engine is ready.

        Raises:
            EngineFailed: it ended before it was, in its first life.
        """
        await self.supervisor.wait_ready()

    async def drain(self) -> None:
        """Take nothing more, let what runs end and be snapshotted, and let go of everyone who waits."""
        if self.runtime_status.draining:
            return
        self.runtime_status.draining = self.dispatcher.stopped = True
        await self.supervisor.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.times.drain):
                await self.outcomes.flush()
        self.futures.close()

    async def close(self) -> None:
        """End the engine and all tasks; what is in the log is taken up by the next service on it."""
        self.runtime_status.draining = self.dispatcher.stopped = True
        await self.janitor.stop()
        if self._taking:
            await asyncio.wait(self._taking, timeout=_LAST_WORDS)
        await self.supervisor.stop()
        await self.outcomes.stop(_LAST_WORDS)
        self.futures.close()

    # what the faces ask

    async def submit(self, submission: Submission, also: Callable[[Any], None] | None = None) -> Accepted:
        """Write an operation into the log and let it run in its turn; returns when it is durable, not when it is done.

        Args:
            submission: what is asked for.
            also: what is written in the same transaction when the operation is new.

        Raises:
            SequenceConflict: another payload came before under that number.
            Unprocessable: its number is too far above those that came; it is not used up.
            Busy: the tenant has too many operations that are not over.
            Unavailable: the service is draining, or its disk takes nothing.
        """
        self._admit(submission)
        await self._check_near(submission)
        task = asyncio.create_task(self._take(submission, also))
        self._taking.add(task)
        task.add_done_callback(self._taking.discard)
        return await asyncio.shield(task)  # a client that goes away leaves no operation that nobody knows of

    async def submit_next(self, submission: Submission) -> Accepted:
        """Submit under the queue's next free number."""
        return await self.submit(submission)

    def awaited(self, submission: Submission) -> bool:
        """Return whether others of its queue wait for its number: to turn it away would hold them up, and so itself."""
        queue = self.dispatcher.queues.get(submission.queue_id)
        gap = queue.order.gap() if queue is not None and queue.ordered else None
        return gap is not None and gap.number == submission.number

    def _admit(self, submission: Submission) -> None:
        if self.runtime_status.lost is not None:
            raise Unavailable(self.runtime_status.lost, retry_after=30.0)
        if self.runtime_status.draining:
            raise Unavailable("the service is going down; it comes back soon", retry_after=5.0)
        queued, limit = self.futures.waiting[submission.tenant], self._settings.limits.queued
        passes = submission.refusal is not None or submission.number is None or self._is_here(submission)
        if queued >= limit and not passes and not self.awaited(submission):
            raise Busy(f"too many unfinished operations: you have {queued} (limit {limit}); wait for some to finish")

    def _is_here(self, submission: Submission) -> bool:
        """Return whether the number of a model's operation came before: it is a repetition, or will be a conflict."""
        queue = self.dispatcher.queues.get(submission.queue_id)
        if queue is None or not queue.ordered or submission.number is None:
            return False
        return submission.number < queue.order.following or queue.order.holds(submission.number)

    async def _check_near(self, submission: Submission) -> None:
        number = submission.number
        if number is None or number <= self._max_gap or not submission.ordered:
            return
        following = (await self.dispatcher.queue(submission.queue_id, submission.tenant, ordered=True)).order.following
        if number - following > self._max_gap:
            raise Unprocessable(
                f"seq_id is {number}, and {following} is the next of {submission.queue_id!r}: it may be at most "
                f"{self._max_gap} above it; count it up by one with each request"
            )

    async def _take(self, submission: Submission, also: Callable[[Any], None] | None) -> Accepted:
        try:
            accepted, operation = await self._journal.submit(submission, also)
        except LeaseLost as error:
            self._lease_lost(str(error))
            raise
        if accepted.fresh:
            operation.asked_by = REQUEST.get()
            if submission.refusal is not None:
                self._tell(operation, Outcome(operation.id, error=submission.refusal, category="user"), 0.0)
            await self._take_up(operation)
        return accepted

    async def _take_up(self, operation: Operation) -> None:
        """Put an operation of the log into its queue; it is there for good, so this goes on until it works."""
        while True:
            try:
                queue = await self.dispatcher.queue(operation.queue_id, operation.tenant, operation.ordered)
                break
            except Exception:
                _log.exception("cannot read a queue; retrying")
                await asyncio.sleep(_AGAIN)
        if operation.id > queue.newest_row:
            if operation.status == "pending":
                self.futures.open(operation)
            self.dispatcher.arrive(queue, operation)
            self._lighten(queue, operation)
        elif (read := self.futures.find(operation.request, operation.tenant)) is not None:
            read.asked_by = operation.asked_by  # the queue was read with it

    def _lighten(self, queue: ModelQueue, operation: Operation) -> None:
        """Keep the payload of an operation that must wait only if it is small, and few do; it is read again."""
        waits = operation.payload is not None and operation.id not in queue.in_flight
        small = len(operation.payload or b"") <= self._settings.limits.small_bytes
        if waits and not (small and len(self.futures) <= _KEPT):
            operation.payload = None

    async def wait(self, request: str, tenant: str, seconds: float) -> Future:
        """Return a future as soon as it is over, or what it is after so many seconds.

        Raises:
            NotFound: it was never given to this tenant.
            Gone: it was, and is no longer kept.
        """
        return await self.futures.wait(request, tenant, seconds)

    async def cancel(self, request: str, tenant: str) -> None:
        """Drop an operation that has not begun; a sampling request is dropped while it runs, too.

        Raises:
            NotFound: it was never given to this tenant.
        """
        operation = self.futures.find(request, tenant)
        if operation is None:
            await self._journal.future(request, tenant)
        else:
            self.cancellation.cancel(operation)

    async def finish_session(self, session: str) -> None:
        """Snapshot and free the models of a session that ends, and fail what still waits in its queues."""
        self.cancellation.leave(f"{session}:", "its session was finished")

    # what others look at

    @property
    def unrecorded(self) -> Collection[str]:
        """Folders of snapshots that are on the disk and not in the log yet."""
        return self._events.unrecorded

    def queued(self, tenant: str) -> int:
        """Return how many operations of a tenant wait or run."""
        return self.futures.waiting[tenant]

    def healthy(self) -> bool:
        """Return whether this process can go on at all."""
        return self.runtime_status.lost is None

    async def status(self) -> dict[str, Any]:
        """Return what the service does at the moment."""
        return self.runtime_status.status()

    # what the engine tells (`supervision.Listener`)

    @property
    def waiting(self) -> int:
        """Number of things that the engine was asked for and did not answer."""
        return len(self.dispatcher.in_flight) + self.dispatcher.restoring

    def engine_up(self, child: Child, info: ModelInfo) -> None:
        """Begin to send."""
        self.info = replace(info, tokenizer=self._settings.tokenizer or info.tokenizer)
        self.runtime_status.last_pass.begin_anew()
        self.dispatcher.engine_up(child)

    async def engine_down(self, blamed: set[int], why: str) -> None:
        """Take back what it had."""
        if self._figures is not None:
            count_death(self._figures, why)
        await self.dispatcher.engine_down(blamed, why)

    def message(self, message: Message) -> None:
        """Take an answer."""
        if message.type == messages.DONE:
            self.runtime_status.ended(message)
            self._events.done(message)
        elif message.type == messages.RESTORED:
            self._events.restored(message)
        elif message.type == messages.SNAPSHOTTED:
            self._events.snapshotted(message)
        elif message.type == messages.DETACHED:
            self._events.detached(message)
        else:
            _log.error("the engine sent a message of unknown type %r", message.type)
        if self._figures is not None:
            count_message(self._figures, message)

    # the rest

    def _written(self, operation: Operation, outcome: Outcome) -> None:
        status = "cancelled" if outcome.cancelled else "done" if outcome.error is None else "failed"
        operation.status = status  # type: ignore[assignment]
        if operation.kind == "create" and status != "done":
            self._never_made(operation, outcome.error or "its creation failed")
        if operation.kind == "save" and status != "done" and operation.payload is not None:
            folder = Save.parse(operation.payload).folder
            self.outcomes.then(lambda: self._effects.remove([folder]))
        future = Future(
            operation.kind, operation.status, operation.queue_id, outcome.result, outcome.error, outcome.category
        )
        self._tell(operation, outcome, self.futures.resolve(operation, future))

    def _tell(self, operation: Operation, outcome: Outcome, seconds: float) -> None:
        """Let the log and the figures have an operation that is over."""
        ending = ending_of(outcome)
        log_ended(operation, ending, seconds)
        if self._figures is not None:
            self._figures.finished(operation.kind, ending, seconds, operation.tokens, operation.tenant)

    def _unwritten(self, operation: Operation) -> None:
        """Restore a model from the log, which does not have the effect of an operation that the model has.

        What was computed after the operation is computed again.
        """
        queue = self.dispatcher.queues.get(operation.queue_id)
        if queue is not None and queue.ordered and queue.closed is None:
            queue.distrust(operation.number)
            again = self.outcomes.withdraw(operation.queue_id)
            self.dispatcher.postpone(queue, "the result of an operation could not be written", again)

    def _never_made(self, operation: Operation, reason: str) -> None:
        queue = self.dispatcher.queues.get(operation.queue_id)
        if queue is not None and queue.closed is None:
            self.dispatcher.close(queue, NEVER_CREATED)
        self.outcomes.then(lambda: self._effects.gone(operation.tenant, operation.queue_id, reason))

    def _end_with_the_engine(self, task: asyncio.Task[None]) -> None:
        """End the process, for who started it to start it again, if nobody looks after the engine any more."""
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.critical("the engine supervisor failed", exc_info=error)
            self._lease_lost("the service failed and is shutting down")

    def _lease_lost(self, why: str) -> None:
        _log.critical("%s; this process does nothing more", why)
        self.runtime_status.lost = why
        self.dispatcher.stopped = True
        self.lost.set()

    async def _drop_idle(self) -> None:
        """Forget idle queues behind what is still to be written; while that cannot be, nothing waits for it."""
        if self.outcomes.trouble is None:
            self.outcomes.then(self._forget_idle)

    async def _forget_idle(self) -> None:
        self.dispatcher.drop_idle()


def _starter(settings: Settings) -> Callable[[bool], Awaitable[Child]]:
    async def start(first: bool) -> Child:
        return await ChildProcess.start(settings, first=first)

    return start


_LACKING = "memory or descriptors are lacking"


class EngineEvents:
    """Handles the messages of the engine about models.

    Args:
        dispatcher: knows what the engine has.
        journal: the log.
        outcomes: writes.
        effects: the rest of the store.

    Attributes:
        unrecorded: folders of snapshots whose rows are not written yet.
    """

    def __init__(self, dispatcher: Dispatcher, journal: Journal, outcomes: Outcomes, effects: Effects) -> None:
        self._dispatcher = dispatcher
        self.unrecorded: set[str] = set()
        self._journal = journal
        self._outcomes = outcomes
        self._effects = effects

    def done(self, message: Message) -> None:
        """Take the answer to an operation; one that was dropped meanwhile is nobody's."""
        flight = self._dispatcher.land(message.head["id"])
        if flight is None:
            return
        operation, queue, error = flight.operation, flight.queue, message.head.get("error")
        if not flight.replay:
            queue.worked()
            self._outcomes.put(operation, self._outcome(operation, message.head, message.body))
            self._follow(queue, operation, failed=error is not None)
        elif error is None:
            self._dispatcher.repeated(operation)
        elif message.head.get("later"):
            self._dispatcher.postpone(queue, _LACKING)
        else:
            self._dispatcher.corrupt(queue, f"operation {operation.number} failed when it was done again: {error}")
        self._dispatcher.release(queue)

    def _outcome(self, operation: Operation, head: dict[str, Any], body: bytes) -> Outcome:
        if head.get("error") is not None:
            return Outcome(operation.id, error=str(head["error"]), category=head.get("category") or "server")
        try:
            outcome = self._effects.done(operation, head.get("extra") or {}, body)
            outcome.composition = head.get("composition")
            return outcome
        except Exception:
            _log.exception("cannot write the result of operation %d", operation.id)
            return Outcome(operation.id, error="the result could not be written", category="server")

    def _follow(self, queue: ModelQueue, operation: Operation, failed: bool) -> None:
        if failed and operation.kind == "create":
            self._dispatcher.close(queue, NEVER_CREATED)
        elif operation.kind == "unload" and not failed:
            self._dispatcher.close(queue, Closed("this model was unloaded"))
            self._outcomes.then(self._effects.unloaded)
        elif not failed and _reads_checkpoint(operation):
            self._dispatcher.tell(Message(messages.SNAPSHOT, {"queue_id": queue.name}))

    def restored(self, message: Message) -> None:
        """Take the answer to a RESTORE."""
        queue = self._dispatcher.queues.get(message.head["queue_id"])
        if queue is None:
            return
        queue.restored()
        if queue.postponed is not None:
            self._dispatcher.forgotten(queue)
        elif message.head.get("later"):
            self._dispatcher.postpone(queue, _LACKING)
        elif message.head.get("error") is not None and queue.closed is None:
            _log.error("snapshot of model %s: %s", queue.name, message.head["error"])
            self._dispatcher.corrupt(queue, "the newest snapshot cannot be read")

    def snapshotted(self, message: Message) -> None:
        """Write that a snapshot is there, behind the outcomes of what it contains."""
        snapshot = Snapshot(**message.head)
        self.unrecorded.add(snapshot.folder)
        queue = self._dispatcher.queues.get(snapshot.queue_id)
        late = queue is not None and queue.state in (State.POSTPONED, State.ATTACHING)  # of a model that was taken back
        agreed = not late and self._agrees(snapshot)

        async def record() -> None:
            if not (agreed and self._agrees(snapshot)):
                await self._effects.remove([snapshot.folder])
            else:
                await self._effects.remove(await self._journal.snapshotted(snapshot))
            self.unrecorded.discard(snapshot.folder)

        self._outcomes.then(record)

    def _agrees(self, snapshot: Snapshot) -> bool:
        """Return whether a snapshot is of a model that goes on, and contains nothing that is to be done again."""
        queue = self._dispatcher.queues.get(snapshot.queue_id)
        return queue is None or (queue.closed is None and queue.agrees_with(snapshot.number))

    def detached(self, message: Message) -> None:
        """Note that the engine let go of a model."""
        queue = self._dispatcher.queues.get(message.head["queue_id"])
        if queue is None:
            return
        if queue.detached() and queue.head is None:
            self._outcomes.then(lambda: self._effects.detached(queue.tenant, queue.name))
        self._dispatcher.kick(queue)


def _reads_checkpoint(operation: Operation) -> bool:
    """Whether it cannot be done again once its checkpoint is deleted, so that a snapshot should cover it soon."""
    if operation.kind == "load":
        return True
    if operation.kind != "create" or operation.payload is None:
        return False
    return orjson.loads(operation.payload).get("source") is not None


@dataclass(slots=True)
class Chore:
    """Something to be done.

    Attributes:
        name: for the log.
        every: seconds from one time to the next.
        work: does it.
        due: when it is next due, on the monotonic clock.
    """

    name: str
    every: float
    work: Callable[[], Awaitable[object]]
    due: float = 0.0


class Janitor:
    """Does chores, one after another."""

    def __init__(self) -> None:
        self._chores: list[Chore] = []
        self._task: asyncio.Task[None] | None = None

    def add(self, name: str, every: float, work: Callable[[], Awaitable[object]]) -> None:
        """Take on a chore."""
        self._chores.append(Chore(name, every, work, time.monotonic() + every))

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._run(), name="janitor")

    async def stop(self) -> None:
        """End."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while self._chores:
            chore = min(self._chores, key=lambda entry: entry.due)
            await asyncio.sleep(max(0.0, chore.due - time.monotonic()))
            try:
                await chore.work()
            except Exception:
                _log.exception("%s failed; it will be retried", chore.name)
            chore.due = time.monotonic() + chore.every
