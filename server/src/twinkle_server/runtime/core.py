"""The running service without its tables: operations are logged, run by the engine, and resolved as futures.

`EngineEvents` handles the engine's messages about models: it writes results and advances, closes or releases queues.
`Janitor` runs periodic chores; a chore that fails is logged and retried at its next interval.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from twinkle_server.engine import messages
from twinkle_server.engine.messages import Message
from twinkle_server.errors import Busy, LeaseLost, Unavailable, Unprocessable
from twinkle_server.operations import (
    Accepted,
    Embed,
    Future,
    Generate,
    ModelInfo,
    Operation,
    Outcome,
    Save,
    Snapshot,
    Submission,
)
from twinkle_server.ports import Effects, Figures, Journal, Tracer
from twinkle_server.runtime.arrivals import Arrivals, Cancellation
from twinkle_server.runtime.dispatch import NEVER_CREATED, Dispatcher
from twinkle_server.runtime.futures import Futures
from twinkle_server.runtime.generations import Generation, Generations
from twinkle_server.runtime.outcomes import Outcomes
from twinkle_server.runtime.queues import MAX_GAP, Closed, ModelQueue, State
from twinkle_server.runtime.status import RuntimeStatus, count_death, count_message, ending_of
from twinkle_server.runtime.supervision import Child, ChildProcess, StartChild, Supervisor
from twinkle_server.settings import Settings
from twinkle_server.telemetry.logs import REQUEST, log_ended

_log = logging.getLogger(__name__)
_WINDOW = 64 * 2**20
_AGAIN = 1.0  # seconds
_KEPT = 1024  # waiting operations whose payloads stay in memory
_KEPT_BYTES = 128 * 2**10  # of a payload that stays in memory
_STREAMS_SHARE = 1 / 3  # of the time of a drain, for streamed requests to end
_ENGINE_WAIT, _GLANCE = 20.0, 0.05  # seconds that a streamed request waits for the engine; between two looks
_ENGINE_ANSWER = 5.0  # seconds to wait for the engine's answer to a withdrawal; it answers between two passes
_LAST_WORDS = 5.0  # seconds to write the remaining outcomes at shutdown


@dataclass(frozen=True, slots=True)
class Unfinished:
    """An operation that has no outcome yet.

    Attributes:
        operation: the operation.
        seconds: since its acceptance, or the start of the service.
        in_engine: whether the engine has it.
        running: whether the engine has begun it.
    """

    operation: Operation
    seconds: float
    in_engine: bool
    running: bool


@dataclass(frozen=True, slots=True)
class Cancelled:
    """What has become of operations that were to be cancelled.

    Attributes:
        cancelled: number of those that are cancelled.
        running: number of those that had begun, and run to their end.
        undecided: number of those whose end is not certain yet: the engine has not said whether they had begun, or the
            cancellation is not written.
    """

    cancelled: int = 0
    running: int = 0
    undecided: int = 0


class Runtime:
    """The `Service` of `ports`, on top of any journal and any engine.

    Attributes:
        info: the base model, as reported by the engine.
        arrivals: requests that are being received.
        lost: set when another process has taken over the data folder; this process must exit.
        stop_requested: set when the process shall drain and exit.
        places: bytes of each model in the engine on the device, in host memory and on disk, as last reported.
        record_rollouts: called with each message `ROLLOUTS`.
        queue_state: see `RuntimeStatus.queue_state`.
        ready: see `RuntimeStatus.ready`.
        on_close: called when the service stops, by parts of it that have processes of their own.

    Args:
        settings: of the service.
        journal: the operation log.
        effects: the rest of the store.
        start_child: starts an engine; the default starts a process.
        figures: metrics; None disables them.
        tracer: follows operations; None disables traces.
    """

    def __init__(
        self,
        settings: Settings,
        journal: Journal,
        effects: Effects,
        start_child: StartChild | None = None,
        figures: Figures | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.info = ModelInfo(settings.served_name, 0, 0)
        self.lost = asyncio.Event()
        self.stop_requested = asyncio.Event()
        self.places: dict[str, list[int]] = {}
        self._located = 0.0
        self.record_rollouts: Callable[[Message], None] = lambda message: None
        self._settings = settings
        self._journal = journal
        self._effects = effects
        self._figures = figures
        self._taking: set[asyncio.Task[Any]] = set()
        self.on_close: list[Callable[[], Awaitable[None]]] = []
        self.futures = Futures(journal, each=settings.limits.queued)
        self.generations = Generations(settings.limits.queued, figures, self._lacks)
        self.outcomes = Outcomes(journal, self._written, self._lease_lost, self._unwritten)
        replayed = (lambda: None) if figures is None else figures.replayed
        self.dispatcher = Dispatcher(journal, self.outcomes, effects, _WINDOW, self.futures.open, replayed)
        self._max_gap = max(MAX_GAP, settings.limits.queued)
        self.arrivals = Arrivals(settings.times.resend)
        self.cancellation = Cancellation(self.dispatcher, journal, self.arrivals, settings.times, self._max_gap)
        self.janitor = Janitor()
        self._events = EngineEvents(self.dispatcher, journal, self.outcomes, effects)
        self.supervisor = Supervisor(start_child or _starter(settings), self, settings.times)
        self.runtime_status = RuntimeStatus(
            self.futures, self.outcomes, self.dispatcher, self.supervisor, settings.times.gap_pause, lambda: self.info
        )
        self.queue_state, self.ready = self.runtime_status.queue_state, self.runtime_status.ready
        if figures is not None:
            self.runtime_status.show(figures)
        self._tracer = tracer
        self.supervisor.began = self._began
        if tracer is not None:
            self.runtime_status.follow(tracer.passed)

    # Lifecycle

    async def start(self) -> None:
        """Resume pending operations and start the engine; return before it is ready (see `wait_ready`)."""
        self.outcomes.start()
        self.supervisor.start().add_done_callback(self._end_with_the_engine)
        try:
            await self._resume_pending()
        except BaseException:
            await self.close()
            raise
        times = self._settings.times
        self.janitor.add("gaps", min(1.0, times.gap_fail / 4), self.cancellation.give_up_gaps)
        self.janitor.add("idle queues", 10.0, self._drop_idle)
        self.janitor.start()

    async def _resume_pending(self) -> None:
        pending = await self._journal.pending()
        if pending:
            self.arrivals.expect_resends()
        for operation in pending:
            queue = await self.dispatcher.queue(operation.queue_id, operation.tenant, operation.ordered)
            if not queue.ordered:
                self.futures.open(operation)
                self.dispatcher.arrive(queue, operation)
            elif operation.number <= queue.snapshot_number:  # a snapshot contains it, but its outcome was not written
                self.futures.open(operation)
                self.dispatcher.fail(operation, "the result could not be written")

    async def wait_ready(self) -> None:
        """Wait until the engine is ready.

        Raises:
            EngineFailed: the first engine ended before it was ready.
        """
        await self.supervisor.wait_ready()

    async def drain(self) -> None:
        """Refuse new operations, let running ones finish and be snapshotted, and release all waiting requests."""
        if self.runtime_status.draining:
            return
        self.runtime_status.draining = self.dispatcher.stopped = True
        await self.generations.ended(self._settings.times.drain * _STREAMS_SHARE)
        self.generations.fail_all("the service is shutting down")
        await self.supervisor.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.times.drain):
                await self.outcomes.flush()
        self.futures.close()

    async def close(self) -> None:
        """Stop the engine and all tasks; the next service on this log resumes what is pending."""
        self.runtime_status.draining = self.dispatcher.stopped = True
        self.generations.fail_all("the service is shutting down")
        await self.janitor.stop()
        for close in self.on_close:
            await close()
        if self._taking:
            await asyncio.wait(self._taking, timeout=_LAST_WORDS)
        await self.supervisor.stop()
        await self.outcomes.stop(_LAST_WORDS)
        self.futures.close()

    # Called by the API

    async def submit(self, submission: Submission, in_transaction: Callable[[Any], None] | None = None) -> Accepted:
        """Write an operation into the log and queue it; return when it is durable, not when it is done.

        Args:
            submission: the operation.
            in_transaction: called in the transaction that writes the operation, if it is new.

        Raises:
            SequenceConflict: the sequence number was used with another payload.
            Unprocessable: the sequence number is too far above the previous ones; it is not used up.
            Busy: the tenant has too many unfinished operations.
            Unavailable: the service is draining, or its disk cannot be written.
        """
        self._admit(submission)
        if not self._passes(submission):
            await self.check_access(submission.tenant)
        await self._check_near(submission)
        task = asyncio.create_task(self._take(submission, in_transaction))
        self._taking.add(task)
        task.add_done_callback(self._taking.discard)
        return await asyncio.shield(task)  # a disconnect must not leave a logged operation without a queue

    async def submit_next(self, submission: Submission) -> Accepted:
        """Submit under the queue's next free number."""
        return await self.submit(submission)

    def awaited(self, submission: Submission) -> bool:
        """Return whether later operations of the queue wait for this number; refusing it would block them."""
        queue = self.dispatcher.queues.get(submission.queue_id)
        gap = queue.order.gap() if queue is not None and queue.ordered else None
        return gap is not None and gap.number == submission.number

    def _check_open(self) -> None:
        if self.runtime_status.lost is not None:
            raise Unavailable(self.runtime_status.lost, retry_after=30.0)
        if self.runtime_status.draining:
            raise Unavailable("the service is shutting down; retry in a few seconds", retry_after=5.0)

    async def _engine_up(self, seconds: float) -> None:
        """Wait for an engine that restarts, for at most `seconds`."""
        end = time.monotonic() + seconds
        while self.dispatcher.child is None and time.monotonic() < end and not self.runtime_status.draining:
            await asyncio.sleep(_GLANCE)

    def _admit(self, submission: Submission) -> None:
        self._check_open()
        queued, limit = self.futures.waiting[submission.tenant], self._settings.limits.queued
        if queued >= limit and not self._passes(submission) and not self.awaited(submission):
            raise Busy(f"too many unfinished operations: you have {queued} (limit {limit}); wait for some to finish")

    async def check_access(self, tenant: str) -> None:
        """Refuse new work of a tenant while the service is reserved for another.

        Raises:
            Locked: it is.
        """

    def _passes(self, submission: Submission) -> bool:
        """Return whether an operation is accepted in any case, because it costs nothing or frees something."""
        free = submission.refusal is not None or submission.number is None or submission.kind == "unload"
        return free or self._is_known(submission)

    def _is_known(self, submission: Submission) -> bool:
        """Return whether the sequence number was submitted before: a retry or a conflict."""
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
                f"seq_id must be at most {self._max_gap} above the next one of {submission.queue_id!r}, which is "
                f"{following}, got {number}; count it up by one with each request"
            )

    async def _take(self, submission: Submission, in_transaction: Callable[[Any], None] | None) -> Accepted:
        try:
            accepted, operation = await self._journal.submit(submission, in_transaction)
        except LeaseLost as error:
            self._lease_lost(str(error))
            raise
        if accepted.fresh:
            operation.http_request = REQUEST.get()
            if self._tracer is not None:
                self._tracer.accepted(operation)
            if submission.refusal is not None:
                self._record_end(operation, Outcome(operation.id, error=submission.refusal, category="user"), 0.0)
            await self._enqueue(operation)
        return accepted

    async def _enqueue(self, operation: Operation) -> None:
        """Put a logged operation into its queue; retries until the queue can be read."""
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
            self._drop_payload(queue, operation)
        elif (loaded := self.futures.find(operation.request, operation.tenant)) is not None:
            loaded.http_request = operation.http_request  # the operation was loaded together with its queue

    def _drop_payload(self, queue: ModelQueue, operation: Operation) -> None:
        """Drop the payload of a waiting operation if it is large or many wait; it is read again before sending."""
        waits = operation.payload is not None and operation.id not in queue.in_flight
        small = len(operation.payload or b"") <= min(self._settings.limits.small_bytes, _KEPT_BYTES)
        if waits and not (small and len(self.futures) <= _KEPT):
            operation.payload = None

    async def wait(self, request: str, tenant: str, seconds: float) -> Future:
        """Return a future when it is resolved, or its current state after `seconds`.

        Raises:
            NotFound: the tenant has no such request.
            Gone: its result is no longer kept.
        """
        return await self.futures.wait(request, tenant, seconds)

    async def generate(self, tenant: str, generate: Generate | Embed) -> Generation:
        """Send a streamed request, or one for vectors, to the engine; it is not written to the log.

        Raises:
            Gone: its model accepts no operations any more.
            Busy: the tenant has too many unfinished requests.
            Unavailable: the service is draining, or the engine or the model is not available.
        """
        self._check_open()
        await self.check_access(tenant)
        self.generations.check(tenant)
        await self._engine_up(_ENGINE_WAIT)
        if generate.model is not None:
            await self.dispatcher.attach(generate.model, tenant)
        return self.generations.open(self.dispatcher.child, tenant, generate)

    async def cancel(self, request: str, tenant: str) -> None:
        """Cancel an operation that has not begun; sampling requests are cancelled while they run, too.

        Its future tells whether it is cancelled: the engine may have begun it meanwhile.

        Raises:
            NotFound: the tenant has no such request.
        """
        operation = self.futures.find(request, tenant)
        if operation is None:
            await self._journal.future(request, tenant)
        else:
            self.cancellation.cancel(operation)

    def unfinished(self, tenant: str | None = None) -> list[Unfinished]:
        """Return the unfinished operations of a tenant, or of all, oldest first."""
        found = []
        for operation, seconds in self.futures.unfinished():
            if tenant is None or operation.tenant == tenant:
                flight = self.dispatcher.in_flight.get(operation.id)
                begun = flight is not None and flight.begun
                found.append(Unfinished(operation, seconds, flight is not None, begun))
        return found

    async def cancel_operations(self, operations: Sequence[Operation]) -> Cancelled:
        """Cancel operations as `cancel` does; return what has become of them, when their end is durable."""
        if not operations:
            return Cancelled()
        answers = self.cancellation.cancel(*operations)
        await asyncio.wait(answers, timeout=_ENGINE_ANSWER)
        await self._settle()
        runs = [answer.done() and not answer.result() for answer in answers]
        pending = [operation.status == "pending" for operation in operations]
        return Cancelled(
            cancelled=sum(operation.status == "cancelled" for operation in operations),
            running=sum(runs and left for runs, left in zip(runs, pending, strict=True)),
            undecided=sum(left and not runs for runs, left in zip(runs, pending, strict=True)),
        )

    async def _settle(self) -> None:
        """Wait a moment until everything that has ended is durable."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_AGAIN):
                await self.outcomes.flush()

    async def cancel_waiting(self, model: str) -> Cancelled:
        """Cancel the operations of a model that have not begun; see `cancel_operations`."""
        unfinished = [entry.operation for entry in self.unfinished() if entry.operation.queue_id == model]
        return await self.cancel_operations(sorted(unfinished, key=lambda operation: operation.number))

    def request_stop(self) -> None:
        """Let the process drain and exit soon, as SIGTERM does; the page that asked for it can still load its parts."""
        asyncio.get_running_loop().call_later(_AGAIN, self.stop_requested.set)

    def locate(self) -> None:
        """Ask the engine where its models are, at most once a second; `places` has the answer when it arrives."""
        now = time.monotonic()
        if now - self._located > _AGAIN:
            self._located = now
            self.dispatcher.send_order(Message(messages.PLACES))

    def place(self, model: str) -> str:
        """Return where a model is: "device", "host" or "disk" of the engine, or what happens to it."""
        queue = self.dispatcher.queues.get(model)
        state = State.DETACHED if queue is None else queue.state
        if state is not State.ATTACHED:
            return "detached" if state is State.CLOSED else state.value
        sizes = self.places.get(model)
        if not sizes or not any(sizes):
            return "engine"
        return ("device", "host", "disk")[next(place for place, size in enumerate(sizes) if size)]

    async def finish_session(self, session: str) -> None:
        """Snapshot and free the models of a finished session, and fail what waits in its queues."""
        self.cancellation.leave(f"{session}:", "its session was finished")

    # Status

    @property
    def unrecorded(self) -> Collection[str]:
        """Folders of snapshots that are on disk but not in the log yet."""
        return self._events.unrecorded

    def queued(self, tenant: str) -> int:
        """Return the number of unfinished operations and streamed requests of a tenant."""
        return self.futures.waiting[tenant] + self.generations.of_tenants[tenant]

    def healthy(self) -> bool:
        """Return whether this process can continue."""
        return self.runtime_status.lost is None

    async def status(self) -> dict[str, Any]:
        """Return the current figures of the service."""
        return {**self.runtime_status.status(), "streams": len(self.generations)}

    # Engine events (`supervision.Listener`)

    @property
    def waiting(self) -> int:
        """Number of unanswered requests to the engine."""
        return len(self.dispatcher.in_flight) + self.dispatcher.restoring + self.generations.unanswered

    def engine_up(self, child: Child, info: ModelInfo) -> None:
        """Start sending to a new engine."""
        self.info = replace(info, tokenizer=self._settings.tokenizer or info.tokenizer)
        self.places = {}
        self.runtime_status.last_pass.reset()
        self.dispatcher.engine_up(child)

    async def engine_down(self, blamed: set[int], why: str) -> None:
        """Take back the operations of an engine that died."""
        if self._figures is not None:
            count_death(self._figures, why)
        self.dispatcher.child = None
        self.generations.fail_all(why)
        await self.dispatcher.engine_down(blamed, why)

    def message(self, message: Message) -> None:
        """Handle a message of the engine."""
        if message.type == messages.TOKENS:
            self.generations.tokens(message)
        elif message.type == messages.DONE:
            if not self.generations.done(message):
                self.runtime_status.ended(message)
                self._events.done(message)
        elif message.type == messages.RESTORED:
            self._events.restored(message)
        elif message.type == messages.SNAPSHOTTED:
            self._events.snapshotted(message)
        elif message.type == messages.DETACHED:
            self.places.pop(message.head["queue_id"], None)
            self._events.detached(message)
        elif message.type == messages.ROLLOUTS:
            self.record_rollouts(message)
        elif message.type == messages.WITHDRAWN:
            self.dispatcher.withdrawn(message.head["ids"], message.head["out"])
        elif message.type == messages.PLACED:
            self.places = message.head["places"]
        elif message.type != messages.PROGRESS:  # which is only counted
            _log.error("the engine sent a message of unknown type %r", message.type)
        if self._figures is not None:
            count_message(self._figures, message)

    # Internals

    def _began(self, operations: Collection[int]) -> None:
        self.dispatcher.began(operations)
        if self._tracer is not None:
            self._tracer.began(operations)

    def _written(self, operation: Operation, outcome: Outcome) -> None:
        status = "cancelled" if outcome.cancelled else "done" if outcome.error is None else "failed"
        operation.status = status  # type: ignore[assignment]
        if operation.kind == "create" and status != "done":
            self._creation_failed(operation, outcome.error or "its creation failed")
        if operation.kind == "save" and status != "done" and operation.payload is not None:
            folder = Save.parse(operation.payload).folder
            self.outcomes.then(lambda: self._effects.remove([folder]))
        future = Future(
            operation.kind, operation.status, operation.queue_id, outcome.result, outcome.error, outcome.category
        )
        self._record_end(operation, outcome, self.futures.resolve(operation, future))

    def _record_end(self, operation: Operation, outcome: Outcome, seconds: float) -> None:
        """Log and count a finished operation."""
        ending = ending_of(outcome)
        log_ended(operation, ending, seconds)
        if self._figures is not None:
            self._figures.finished(operation.kind, ending, seconds, operation.tokens, operation.tenant)
        if self._tracer is not None:
            self._tracer.ended(operation, ending)

    def _unwritten(self, operation: Operation) -> None:
        """Restore a model from the log, because the engine has an effect that the log does not have.

        Later operations of the model run again.
        """
        queue = self.dispatcher.queues.get(operation.queue_id)
        if queue is not None and queue.ordered and queue.closed is None:
            queue.distrust(operation.number)
            why = "the result of an operation of this model could not be written, and its weights are restored"
            self.generations.fail_model(queue.name, self.dispatcher.child, why)
            again = self.outcomes.withdraw(operation.queue_id)
            self.dispatcher.postpone(queue, "the result of an operation could not be written", again)

    def _lacks(self, model: str, release: Callable[[], None]) -> bool:
        """Call `release` when the results of a model are durable, and return True, unless they already are."""

        async def settled() -> None:
            release()

        if self.outcomes.settled(model):
            return False
        self.outcomes.then(settled)
        return True

    def _creation_failed(self, operation: Operation, reason: str) -> None:
        queue = self.dispatcher.queues.get(operation.queue_id)
        if queue is not None and queue.closed is None:
            self.dispatcher.close(queue, NEVER_CREATED)
        self.outcomes.then(lambda: self._effects.gone(operation.tenant, operation.queue_id, reason))

    def _end_with_the_engine(self, task: asyncio.Task[None]) -> None:
        """Shut the process down if the supervisor failed, so that its parent restarts it."""
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.critical("the engine supervisor failed", exc_info=error)
            self._lease_lost("the service failed and is shutting down")

    def _lease_lost(self, why: str) -> None:
        _log.critical("%s; this process stops all work", why)
        self.runtime_status.lost = why
        self.dispatcher.stopped = True
        self.lost.set()

    async def _drop_idle(self) -> None:
        """Drop idle queues after pending outcomes are written; skipped while the store cannot be written."""
        if self.outcomes.trouble is None:
            self.outcomes.then(self._forget_idle)

    async def _forget_idle(self) -> None:
        self.dispatcher.drop_idle()


def _starter(settings: Settings) -> Callable[[bool], Awaitable[Child]]:
    async def start(first: bool) -> Child:
        return await ChildProcess.start(settings, first=first)

    return start


_LACKING = "not enough memory or file descriptors"


class EngineEvents:
    """Handles messages of the engine about models.

    Args:
        dispatcher: the operations in flight.
        journal: the operation log.
        outcomes: the writer of outcomes.
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
        """Handle the answer to an operation; its result is ignored if it was cancelled or taken back."""
        flight, error = self._dispatcher.pop_in_flight(message.head["id"]), message.head.get("error")
        if flight is None:
            if error is None:
                self._dispatcher.repeated(message.head["id"])  # a replay that was taken back did not kill the engine
            return
        operation, queue = flight.operation, flight.queue
        if not flight.replay:
            queue.worked()
            self._outcomes.put(operation, self._outcome(operation, message.head, message.body))
            self._follow(queue, operation, failed=error is not None)
        elif error is None:
            self._dispatcher.repeated(operation.id)
        elif message.head.get("later"):
            self._dispatcher.postpone(queue, _LACKING)
        else:
            self._dispatcher.corrupt(queue, f"operation {operation.number} failed when it was repeated: {error}")
        self._dispatcher.release(queue)

    def _outcome(self, operation: Operation, head: dict[str, Any], body: bytes) -> Outcome:
        if head.get("error") is not None:
            return Outcome(operation.id, error=str(head["error"]), category=head.get("category") or "server")
        try:
            outcome = self._effects.done(operation, head.get("extra") or {}, body)
            outcome.composition = head.get("composition")
            outcome.figures = head.get("figures")
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
            self._dispatcher.send_order(Message(messages.SNAPSHOT, {"queue_id": queue.name}))

    def restored(self, message: Message) -> None:
        """Handle the answer to a RESTORE."""
        queue = self._dispatcher.queues.get(message.head["queue_id"])
        if queue is None:
            return
        queue.restored()
        if queue.postponed is not None:
            if queue.dropped:
                self._dispatcher.forgotten(queue)
        elif message.head.get("later"):
            self._dispatcher.postpone(queue, _LACKING)
        elif message.head.get("error") is not None and queue.closed is None:
            _log.error("snapshot of model %s: %s", queue.name, message.head["error"])
            self._dispatcher.corrupt(queue, "the newest snapshot cannot be read")

    def snapshotted(self, message: Message) -> None:
        """Record a snapshot after the outcomes of the operations that it contains."""
        snapshot = Snapshot(**message.head)
        self.unrecorded.add(snapshot.folder)
        queue = self._dispatcher.queues.get(snapshot.queue_id)
        late = queue is not None and _is_replaced(queue)
        agreed = not late and self._agrees(snapshot)

        async def record() -> None:
            if not (agreed and self._agrees(snapshot)):
                await self._effects.remove([snapshot.folder])
            else:
                await self._effects.remove(await self._journal.snapshotted(snapshot))
            self.unrecorded.discard(snapshot.folder)

        self._outcomes.then(record)

    def _agrees(self, snapshot: Snapshot) -> bool:
        """Return whether a snapshot is of an open model and contains no operation that will run again."""
        queue = self._dispatcher.queues.get(snapshot.queue_id)
        return queue is None or (queue.closed is None and queue.agrees_with(snapshot.number))

    def detached(self, message: Message) -> None:
        """Handle the release of a model by the engine."""
        queue = self._dispatcher.queues.get(message.head["queue_id"])
        if queue is None:
            return
        if queue.detached() and queue.head is None:
            self._outcomes.then(lambda: self._effects.detached(queue.tenant, queue.name))
        self._dispatcher.send_ready(queue)


def _is_replaced(queue: ModelQueue) -> bool:
    """Whether the engine's model was taken back, so that a snapshot of it is late.

    While a snapshot is to be read, a later one must not replace it, because recording it removes the folder.
    """
    return queue.restoring or queue.state in (State.POSTPONED, State.ATTACHING)


def _reads_checkpoint(operation: Operation) -> bool:
    """Whether replay needs a checkpoint that may be deleted, so that a snapshot should be taken soon."""
    if operation.kind == "load":
        return True
    if operation.kind != "create" or operation.payload is None:
        return False
    return orjson.loads(operation.payload).get("source") is not None


@dataclass(slots=True)
class Chore:
    """A periodic task.

    Attributes:
        name: for the log.
        every: interval in seconds.
        work: the function.
        due: next run, in seconds of the monotonic clock.
    """

    name: str
    every: float
    work: Callable[[], Awaitable[object]]
    due: float = 0.0


class Janitor:
    """Runs chores, one at a time."""

    def __init__(self) -> None:
        self._chores: list[Chore] = []
        self._task: asyncio.Task[None] | None = None

    def add(self, name: str, every: float, work: Callable[[], Awaitable[object]]) -> None:
        """Add a chore."""
        self._chores.append(Chore(name, every, work, time.monotonic() + every))

    def start(self) -> None:
        """Start the task."""
        self._task = asyncio.create_task(self._run(), name="janitor")

    async def stop(self) -> None:
        """Stop the task."""
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
