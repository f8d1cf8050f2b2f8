"""From queues to the engine: operations are sent in order, replayed after a crash, and taken back when it dies."""

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from twinkle_server.engine import messages
from twinkle_server.engine.messages import LinkClosed, Message
from twinkle_server.errors import Gone, Unavailable
from twinkle_server.operations import PASSES, Category, Operation, Outcome, Sample
from twinkle_server.ports import Effects, Journal
from twinkle_server.runtime.outcomes import Outcomes
from twinkle_server.runtime.queues import Closed, InFlight, ModelQueue, State
from twinkle_server.runtime.supervision import Child

_FRAME = 512


@dataclass(slots=True)
class _Waiting:
    size: int
    granted: asyncio.Future[None]


class Window:
    """A limit on bytes in flight, shared fairly between tenants whatever the number of their queues.

    Args:
        limit: bytes; a larger operation is sent when nothing else is in flight.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._waiting: OrderedDict[str, deque[_Waiting]] = OrderedDict()

    def try_acquire(self, size: int) -> bool:
        """Reserve bytes for an operation if they are free and no tenant waits."""
        if self._waiting or not self._fits(size):
            return False
        self._used += size + _FRAME
        return True

    async def acquire(self, tenant: str, size: int) -> None:
        """Reserve bytes for an operation; wait until they are free."""
        if self.try_acquire(size):
            return
        entry = _Waiting(size, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(tenant, deque()).append(entry)
        try:
            await entry.granted
        except asyncio.CancelledError:
            if entry.granted.done() and not entry.granted.cancelled():
                self.release(size)
            else:
                self._forget(tenant, entry)
            raise

    def release(self, size: int) -> None:
        """Release bytes."""
        self._used -= size + _FRAME
        self._grant()

    @property
    def used(self) -> int:
        """Bytes reserved."""
        return self._used

    def _fits(self, size: int) -> bool:
        return self._used == 0 or self._used + size + _FRAME <= self._limit

    def _forget(self, tenant: str, entry: _Waiting) -> None:
        queue = self._waiting.get(tenant, deque())
        if entry in queue:
            queue.remove(entry)
        if not queue:
            self._waiting.pop(tenant, None)
        self._grant()

    def _grant(self) -> None:
        while self._waiting:
            tenant, queue = next(iter(self._waiting.items()))
            if not self._fits(queue[0].size):
                return
            entry = queue.popleft()
            self._waiting.pop(tenant)
            if queue:
                self._waiting[tenant] = queue
            if not entry.granted.done():
                self._used += entry.size + _FRAME
                entry.granted.set_result(None)


_log = logging.getLogger(__name__)
_RETRY: Final = 1.0
"""Seconds before reading the operations of a queue is retried."""
MAX_DEATHS: Final = 6
"""Consecutive deaths of engines by the same operation or snapshot, after which its model is given up."""
PAUSES = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Seconds before a model is attached again, by the number of consecutive postponements."""
_ATTACHMENTS: Final = 5
_POLL: Final = 0.02
_DETACHING_POLLS: Final = 100
NEVER_CREATED: Final = Closed("this model does not exist: its creation failed")


class Corrupted(Exception):
    """A model cannot be restored; the message says why."""


class Dispatcher:
    """Sends the operations of all queues to the engine, within a window of bytes.

    Args:
        journal: the operation log.
        outcomes: the writer of outcomes.
        effects: the rest of the store.
        window: bytes that may be in flight.
        opened: called with each pending operation that is read from the log.
        replayed: called for each replay.
    """

    def __init__(
        self,
        journal: Journal,
        outcomes: Outcomes,
        effects: Effects,
        window: int,
        opened: Callable[[Operation], None] = lambda operation: None,
        replayed: Callable[[], None] = lambda: None,
    ) -> None:
        self._journal, self._outcomes, self._effects = journal, outcomes, effects
        self._window_bytes = window
        self._window = Window(window)
        self._opened, self._replayed = opened, replayed
        self._loading: dict[str, asyncio.Task[ModelQueue]] = {}
        self._senders: dict[ModelQueue, asyncio.Task[None]] = {}
        self._burials: set[asyncio.Task[None]] = set()
        self._deaths: dict[int, int] = {}  # deaths of engines during a replay, by operation
        self._suspects = asyncio.Lock()
        self.queues: dict[str, ModelQueue] = {}
        self.in_flight: dict[int, InFlight] = {}
        self.child: Child | None = None
        self.stopped = False
        self.replays = 0
        self._weights: Mapping[str, float] = {}

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Set the weights of tenants in the engine; those of all others are 1."""
        if weights != self._weights:
            self._weights = dict(weights)
            self.send_order(self._weights_message())

    def _weights_message(self) -> Message:
        return Message(messages.WEIGHTS, {"weights": dict(self._weights)})

    # Queues

    async def queue(self, name: str, tenant: str, ordered: bool) -> ModelQueue:
        """Return a queue; load it from the log if it is not in memory."""
        if name in self.queues:
            return self.queues[name]
        if not ordered:
            return self.queues.setdefault(name, ModelQueue(name, tenant, ordered=False))
        if (loading := self._loading.get(name)) is None:  # concurrent requests share one load
            loading = self._loading[name] = asyncio.create_task(self._load(name, tenant))
            loading.add_done_callback(lambda _: self._loading.pop(name, None))
        return await asyncio.shield(loading)

    async def _load(self, name: str, tenant: str) -> ModelQueue:
        await self._outcomes.flush()
        reason = await self._effects.closed(tenant, name)
        closed = Closed(*reason) if reason else None
        snapshot = await self._journal.snapshot(name)
        number = snapshot.number if snapshot else -1
        rows = await self._journal.after(name, number)
        if any(row.kind == "create" and row.status in ("failed", "cancelled") for row in rows):
            closed = closed or NEVER_CREATED
        newest = max((row.id for row in rows), default=0)
        queue = ModelQueue(name, tenant, ordered=True, snapshot_number=number, newest_row=newest, closed=closed)
        self.queues[name] = queue
        for row in rows:
            if row.status == "pending":
                self._opened(row)
            self.arrive(queue, row)
        return queue

    def arrive(self, queue: ModelQueue, operation: Operation) -> None:
        """Put a new operation into its queue."""
        if operation.status != "pending":
            queue.order.use_up(operation.number)
        elif operation.attempts > 1:
            queue.order.use_up(operation.number)
            self.fail(operation, "the engine died twice while running this operation; it is not retried")
        elif not queue.arrive(operation, time.monotonic()):
            self.fail(
                operation, f"sequence number {operation.number} of this model was already used or skipped", "user"
            )
        self.send_ready(queue)

    def fail(self, operation: Operation, reason: str, category: Category = "server") -> None:
        """Fail an operation that was not sent to the engine."""
        self._outcomes.put(operation, Outcome(operation.id, error=reason, category=category))

    def cancel(self, operation: Operation) -> None:
        """End an operation as cancelled that the engine does not have, and will not be sent."""
        outcome = Outcome(operation.id, error="it was cancelled", category="user", cancelled=True)
        self._outcomes.put(operation, outcome)

    def close(self, queue: ModelQueue, closed: Closed) -> None:
        """Close a queue and fail its waiting operations."""
        for operation in queue.close(closed):
            self.fail(operation, closed.reason, closed.category)

    def drop_idle(self) -> None:
        """Remove idle queues from memory."""
        for name in [name for name, queue in self.queues.items() if queue.idle]:
            del self.queues[name]

    @property
    def restoring(self) -> int:
        """Number of models that the engine is to restore or to drop."""
        return sum(not queue.dropped for queue in self.queues.values())

    # Sending

    def send_ready(self, queue: ModelQueue) -> None:
        """Send what is possible without waiting; start a task for the rest."""
        if queue.closed is not None:
            self.close(queue, queue.closed)
        child = self.child
        if child is None or self.stopped or not queue.may_send:
            return
        try:
            while queue.head is not None and self._send_now(child, queue, queue.head):
                pass
        except LinkClosed:
            return
        if queue.head is not None:
            queue.start_sending()
            self._senders[queue] = asyncio.create_task(self._send_all(child, queue), name=f"send {queue.name}")

    def _send_now(self, child: Child, queue: ModelQueue, operation: Operation) -> bool:
        payload = operation.payload
        if payload is None or operation.kind == "sample" or queue.must_attach:
            return False
        if not self._window.try_acquire(len(payload)):
            return False
        self._send(child, queue, operation, payload)
        return True

    async def attach(self, name: str, tenant: str) -> None:
        """Have a model in the engine, or on its way there before all later messages.

        Raises:
            Gone: the model accepts no operations any more.
            Unavailable: there is no engine, or the model cannot be restored at the moment.
        """
        queue = await self.queue(name, tenant, ordered=True)
        for _ in range(_ATTACHMENTS):
            await self._detached(queue)
            if queue.closed is not None:
                raise Gone(queue.closed.reason)
            if not queue.must_attach:
                return
            child = self.child
            if child is None or self.stopped:
                break
            if queue.may_send:
                queue.start_sending()
                work = self._send_all(child, queue, attach=True)
                self._senders[queue] = asyncio.create_task(work, name=f"attach {name}")
            if (sender := self._senders.get(queue)) is None:
                break
            await asyncio.wait({sender})
        leaving = queue.state is State.DETACHING
        reason = queue.postponed or ("it is being written to disk" if leaving else "the engine is starting")
        raise Unavailable(f"this model will be restored as soon as possible: {reason}", retry_after=_RETRY)

    async def _detached(self, queue: ModelQueue) -> None:
        """Wait a moment while the engine frees a model, as after the end of its session."""
        for _ in range(_DETACHING_POLLS):
            if queue.state is not State.DETACHING:
                return
            await asyncio.sleep(_POLL)

    async def _send_all(self, child: Child, queue: ModelQueue, attach: bool = False) -> None:
        """Send the ready operations, attaching the model first; wait for the log and the window.

        Args:
            child: the engine.
            queue: of the model.
            attach: attach the model even if no operation is ready.
        """
        try:
            if attach and queue.must_attach and queue.closed is None:
                await self._attach(child, queue)
            while queue.head is not None and queue.closed is None and not self.stopped:
                if queue.must_attach:
                    await self._attach(child, queue)
                else:
                    await self._send_when_possible(child, queue, queue.head)
                await child.room()
        except LinkClosed:
            await asyncio.Event().wait()  # the engine died, and this task is about to be cancelled
        except Corrupted as error:
            self.corrupt(queue, str(error))
        except Exception:
            _log.exception("cannot read the operations of model %s; retrying", queue.name)
            await asyncio.sleep(_RETRY)
        finally:
            if self._senders.get(queue) is asyncio.current_task():  # otherwise the task was cancelled by its queue
                del self._senders[queue]
                queue.stop_sending()
        self.send_ready(queue)
        self.release(queue)

    async def _send_when_possible(self, child: Child, queue: ModelQueue, operation: Operation) -> None:
        try:
            payload = await self._payload(operation)
        except Corrupted:
            if queue.head is operation:
                raise
            return  # the operation was cancelled meanwhile, which drops its payload
        if operation.kind == "sample":
            payload = await self._with_source(queue, operation, payload)
        await self._window.acquire(operation.tenant, len(payload))
        if queue.closed is None and queue.head is operation:
            self._send(child, queue, operation, payload)
        else:
            self._window.release(len(payload))

    async def _payload(self, operation: Operation) -> bytes:
        if operation.payload is not None:
            return operation.payload
        try:
            return await self._journal.payload(operation.id)
        except LookupError as error:
            raise Corrupted(f"the payload of operation {operation.number} is missing") from error

    async def _with_source(self, queue: ModelQueue, operation: Operation, payload: bytes) -> bytes:
        """Return the payload of a sampling request with the folder of the newest weights."""
        sample = Sample.parse(payload)
        if sample.inflight is None:
            return payload
        sample.source = await self._effects.inflight_folder(operation.tenant, sample.inflight)
        if sample.source is None and queue.withdraw(operation):
            self.fail(operation, f"model {sample.inflight} has no inflight weights; save them first", "user")
        return sample.dump()

    def _send(self, child: Child, queue: ModelQueue, operation: Operation, payload: bytes) -> None:
        self._put(child, InFlight(operation, queue, len(payload)), payload)
        operation.payload = None if operation.kind in PASSES or operation.kind == "sample" else payload

    def _put(self, child: Child, flight: InFlight, payload: bytes, composition: str | None = None) -> None:
        """Send an operation whose bytes are reserved."""
        operation = flight.operation
        flight.queue.sent(flight)
        self.in_flight[operation.id] = flight
        head = {
            "id": operation.id,
            "queue_id": operation.queue_id,
            "number": operation.number,
            "kind": operation.kind,
            "tenant": operation.tenant,
            "tokens": operation.tokens,
            "alone": operation.attempts > 0 or operation.id in self._deaths,
            "replay": flight.replay,
        }
        if composition is not None:
            head["composition"] = composition
        child.put(Message(messages.RUN, head, payload))

    def pop_in_flight(self, operation: int) -> InFlight | None:
        """Remove an operation from those in flight, and return it; None if it is not in flight."""
        flight = self.in_flight.pop(operation, None)
        if flight is not None:
            flight.queue.remove_in_flight(operation)
            self._window.release(flight.size)
            flight.answer(withdrawn=False)
        return flight

    def began(self, operations: Collection[int]) -> None:
        """Note that the engine runs operations."""
        for operation in operations:
            if (flight := self.in_flight.get(operation)) is not None:
                flight.begun = True

    # Withdrawing: an operation that the engine has, but has not begun

    def withdraw(self, flights: Sequence[InFlight]) -> "list[asyncio.Future[bool]]":
        """Ask the engine to take operations out; return, for each, whether it is cancelled, once that is known.

        Until the engine answers, an operation is neither cancelled nor certain to run. If the engine dies, or its model
        is taken out of it, before the answer comes, the operation has no effect: it is cancelled, and not sent again.
        """
        asked = [flight for flight in flights if flight.withdrawal is None]
        for flight in asked:
            flight.withdrawal = asyncio.get_running_loop().create_future()
        if asked:
            self.send_order(Message(messages.WITHDRAW, {"ids": [flight.operation.id for flight in asked]}))
        return [flight.withdrawal for flight in flights if flight.withdrawal is not None]

    def withdrawn(self, asked: Sequence[int], out: Collection[int]) -> None:
        """Handle the answer to WITHDRAW: what the engine has taken out is cancelled, and the rest runs on."""
        queues: dict[str, ModelQueue] = {}
        for operation in asked:
            flight = self.in_flight.get(operation)
            if flight is None or flight.replay:
                continue  # it has ended, or the engine has lost it, before the answer came
            if operation not in out:
                flight.answer(withdrawn=False)
                continue
            self._cancel_flight(flight)
            self.pop_in_flight(operation)
            queues[flight.queue.name] = flight.queue
        for queue in queues.values():
            self.send_ready(queue)
            self.release(queue)

    def _cancel_flight(self, flight: InFlight) -> None:
        flight.answer(withdrawn=True)
        self.cancel(flight.operation)

    def send_order(self, message: Message) -> None:
        """Send a message that concerns only the current engine; dropped without one."""
        if self.child is not None:
            with contextlib.suppress(LinkClosed):
                self.child.put(message)

    # Attaching: the newest snapshot, then the operations after it

    async def _attach(self, child: Child, queue: ModelQueue) -> None:
        """Restore a model in the engine, and replay the operations after the snapshot in order.

        Raises:
            Corrupted: data for this is missing.
            LinkClosed: the engine died.
        """
        queue.start_attaching()
        sent = False
        try:
            while not queue.dropped:  # otherwise answers of an attempt that failed would count for this one
                await asyncio.sleep(_POLL)
            if queue.closed is not None:
                return
            await self._outcomes.flush()
            if queue.restore_deaths >= MAX_DEATHS:
                raise Corrupted(f"the engine died {MAX_DEATHS} times while it read the newest snapshot")
            snapshot = await self._journal.snapshot(queue.name)
            rows = await self._journal.after(queue.name, snapshot.number if snapshot else -1)
            done = [row for row in rows if row.status == "done"]
            if snapshot or done:
                await self._effects.attached(queue.tenant, queue.name)
                sent = True
                await self._restore(child, queue, snapshot.folder if snapshot else None)
            for row in done:
                await self._repeat(child, queue, row)
        except LinkClosed:
            raise  # the death is counted by `engine_down`
        except Exception as error:
            for number in list(queue.in_flight):
                self.pop_in_flight(number)
            if sent and not isinstance(error, Corrupted):  # `corrupt` drops the model, too
                self._forget(queue)
            queue.attaching_failed()
            raise
        queue.attached()

    async def _restore(self, child: Child, queue: ModelQueue, folder: str | None) -> None:
        """Read a snapshot in the engine. Snapshots that engines died of are read one at a time."""
        async with self._suspects if queue.restore_deaths else contextlib.nullcontext():
            answered = asyncio.get_running_loop().create_future()
            queue.start_restoring(answered)  # before `put`: an engine that is dead already counts as a death of it
            child.put(Message(messages.RESTORE, {"queue_id": queue.name, "folder": folder}))
            if queue.restore_deaths:
                await answered

    async def _repeat(self, child: Child, queue: ModelQueue, operation: Operation) -> None:
        """Replay an operation of which only the effect is needed."""
        if self._deaths.get(operation.id, 0) >= MAX_DEATHS:
            raise Corrupted(f"the engine died {MAX_DEATHS} times while it repeated operation {operation.number}")
        try:
            payload = operation.payload
            payload = await self._journal.payload(operation.id) if payload is None else payload
            composition = await self._journal.composition(operation.id)
        except LookupError as error:
            raise Corrupted(f"the payload of operation {operation.number} is missing") from error
        await self._window.acquire(operation.tenant, len(payload))
        if queue.closed is not None:
            self._window.release(len(payload))
            return
        self.replays += 1
        self._replayed()
        self._put(child, InFlight(operation, queue, len(payload), replay=True), payload, composition)

    def repeated(self, operation: int) -> None:
        """Handle the end of a replay."""
        self._deaths.pop(operation, None)

    # Detaching, postponing, giving up

    def release(self, queue: ModelQueue) -> None:
        """Detach a model that is to be detached, if no operation runs."""
        todo = queue.release(engine=self.child is not None)
        if todo == "detach":
            self.send_order(Message(messages.DETACH, {"queue_id": queue.name}))
        elif todo == "detached":
            self._outcomes.then(lambda: self._effects.detached(queue.tenant, queue.name))

    def postpone(self, queue: ModelQueue, reason: str, again: Sequence[Operation] = ()) -> None:
        """Take a model out of the engine, and attach it again after a pause.

        Without an engine, operations are only put back; the model is attached to the next engine.

        Args:
            queue: of the model.
            reason: shown to clients.
            again: operations that the engine has finished but that must run again first.
        """
        if self.child is None or (flights := queue.postpone(reason)) is None:
            queue.put_back(again)
            if self.child is None:
                self._outcomes.then(queue.trust)
            return
        _log.warning("cannot restore model %s yet: %s; retrying later", queue.name, reason)
        if (sender := self._senders.pop(queue, None)) is not None:
            sender.cancel()
        back: list[Operation] = []
        for flight in flights:
            if flight.withdrawal is not None:
                self._cancel_flight(flight)
            elif not flight.replay:
                back.append(flight.operation)
            self.pop_in_flight(flight.operation.id)
        queue.put_back([*again, *back])
        self._forget(queue)

    def forgotten(self, queue: ModelQueue) -> None:
        """Start the pause of a postponed model; the engine has dropped it and sends no more messages about it."""
        self._outcomes.then(queue.trust)  # after the snapshots that the engine reported before
        pause = PAUSES[min(queue.next_attempt(), len(PAUSES) - 1)]
        asyncio.get_running_loop().call_later(pause, self._resume, queue, queue.postponements)

    def _resume(self, queue: ModelQueue, postponement: int) -> None:
        queue.resume(postponement)
        self.send_ready(queue)
        self.release(queue)

    def corrupt(self, queue: ModelQueue, why: str) -> None:
        """Close a model that cannot be restored; its operations fail with the path of its last checkpoint."""
        victims = [flight.operation for flight in queue.in_flight.values() if not flight.replay]
        for number in list(queue.in_flight):
            self.pop_in_flight(number)
        victims += queue.close(Closed(f"cannot restore this model: {why}", "server"))
        self._forget(queue)
        _log.error("cannot restore model %s: %s", queue.name, why)
        task = asyncio.create_task(self._fail_all(queue, victims))
        self._burials.add(task)
        task.add_done_callback(self._burials.discard)

    async def _fail_all(self, queue: ModelQueue, victims: list[Operation]) -> None:
        reason = queue.closed.reason if queue.closed else ""
        try:
            last = await self._effects.last_checkpoint(queue.tenant, queue.name)
            reason += f"; its last good checkpoint is {last}" if last else "; it has no checkpoint"
        except Exception:
            _log.exception("cannot look up the last checkpoint of a model")
        victims += queue.close(Closed(reason, "server"))
        self._outcomes.then(lambda: self._effects.corrupted(queue.tenant, queue.name, reason))
        for operation in victims:
            self.fail(operation, reason)

    def _forget(self, queue: ModelQueue) -> None:
        """Drop a model in the engine without a snapshot."""
        if self.child is not None:
            with contextlib.suppress(LinkClosed):
                self.child.put(Message(messages.RESTORE, {"queue_id": queue.name, "folder": None}))
                queue.start_dropping()

    # Engines

    def engine_up(self, child: Child) -> None:
        """Start sending to a new engine."""
        self.child = child
        if self._weights:
            self.send_order(self._weights_message())
        for queue in list(self.queues.values()):
            self.send_ready(queue)

    async def engine_down(self, blamed: set[int], why: str) -> None:
        """Take back the operations of an engine that died; an operation that ran in two such engines fails.

        Args:
            blamed: ids of the operations that were running.
            why: shown to clients.
        """
        self.child = None
        senders = list(self._senders.values())
        self._senders.clear()
        for sender in senders:
            sender.cancel()
        if senders:
            await asyncio.wait(senders)
        counted = [number for number in blamed if number in self.in_flight and not self.in_flight[number].replay]
        counted += [operation.id for queue in self.queues.values() for operation in queue.ready_among(blamed)]
        if counted:
            self._outcomes.then(lambda: self._journal.blame(sorted(counted)))
        for queue in list(self.queues.values()):
            self._blame_postponed(queue, blamed, why)
            self._take_back(queue, blamed, why)
        self.in_flight.clear()
        self._window = Window(self._window_bytes)
        await self._outcomes.flush()

    def _blame_postponed(self, queue: ModelQueue, blamed: Collection[int], why: str) -> None:
        """Count the death of the engine for operations that it was running, but that were taken back before."""
        for operation in queue.ready_among(blamed):
            operation.attempts += 1
            if operation.attempts > 1 and queue.withdraw(operation):
                self._fail_killer(operation, why)

    def _fail_killer(self, operation: Operation, why: str) -> None:
        self.fail(operation, f"{why}, twice while running this operation; it is not retried")

    def _take_back(self, queue: ModelQueue, blamed: Collection[int], why: str) -> None:
        again: list[Operation] = []
        for flight in queue.engine_died(blamed):
            operation, guilty = flight.operation, flight.operation.id in blamed
            if flight.replay:
                if guilty:
                    self._deaths[operation.id] = self._deaths.get(operation.id, 0) + 1
                continue
            operation.attempts += guilty
            if flight.withdrawal is not None:
                self._cancel_flight(flight)
            elif operation.attempts > 1:
                self._fail_killer(operation, why)
            else:
                again.append(operation)
        queue.put_back(again)
        if queue.distrusts:
            self._outcomes.then(queue.trust)
        self.release(queue)
