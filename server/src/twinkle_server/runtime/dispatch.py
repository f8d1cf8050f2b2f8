"""From lanes to the engine: operations whose turn it is are sent, within a window, and taken back when it dies."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from twinkle_server.engine import messages
from twinkle_server.engine.messages import Message
from twinkle_server.link import LinkClosed
from twinkle_server.operations import PASSES, Category, Operation, Outcome
from twinkle_server.payloads import Sample
from twinkle_server.ports import Effects, Journal
from twinkle_server.runtime.child import Child
from twinkle_server.runtime.outcomes import Outcomes
from twinkle_server.runtime.replay import Corrupted, Replay
from twinkle_server.runtime.tracks import Closed, Flight, Track
from twinkle_server.runtime.window import Window

_log = logging.getLogger(__name__)
_AGAIN = 1.0  # seconds after which a lane is tried again whose operations could not be read


class Dispatcher:
    """Keeps the lanes in memory, and knows what the engine has of each.

    Args:
        journal: the log.
        outcomes: writes what came of it.
        effects: the rest of the store.
        window: bytes that may be on their way to the engine.
    """

    def __init__(self, journal: Journal, outcomes: Outcomes, effects: Effects, window: int) -> None:
        self._journal = journal
        self._outcomes = outcomes
        self._effects = effects
        self._window_bytes = window
        self._window = Window(window)
        self.replay = Replay(journal, outcomes, effects, self)
        self._tasks: set[asyncio.Task[None]] = set()
        self.tracks: dict[str, Track] = {}
        self.flights: dict[int, Flight] = {}
        self.child: Child | None = None
        self.stopped = False
        self.replays = 0
        self.replayed: Callable[[], None] = lambda: None

    def arrive(self, track: Track, operation: Operation) -> None:
        """Put an operation into its lane, which does not have it yet."""
        if operation.status != "pending":
            track.order.use_up(operation.number)
        elif operation.attempts > 1:
            track.order.use_up(operation.number)
            self.fail(operation, "the engine died twice while it was under way; it is not tried again")
        elif not track.ordered:
            track.order.ready.append(operation)
        elif not track.order.arrive(operation.number, operation, time.monotonic()):
            self.fail(operation, f"number {operation.number} of this model is over: it was given up, or ran", "user")
        self.kick(track)

    def fail(self, operation: Operation, reason: str, category: Category = "server") -> None:
        """End an operation that the engine does not have."""
        self._outcomes.put(operation, Outcome(operation.id, error=reason, category=category))

    def close(self, track: Track, closed: Closed) -> None:
        """Fail what waits in a lane, and everything that still comes."""
        track.closed = closed
        for operation in track.order.drop_all():
            self.fail(operation, closed.reason, closed.category)

    def kick(self, track: Track) -> None:
        """Send what may be sent of a lane; what must be waited for is left to a task of the lane's own."""
        if track.closed is not None:
            self.close(track, track.closed)
        child = self.child
        held = track.pump is not None or track.detaching or track.postponed is not None
        if child is None or self.stopped or held:
            return
        try:
            while track.order.ready and self._send_now(child, track):
                pass
        except LinkClosed:
            return
        if track.order.ready:
            track.pump = asyncio.create_task(self._pump(child, track), name=f"pump {track.name}")

    def _send_now(self, child: Child, track: Track) -> bool:
        operation = track.order.ready[0]
        payload = operation.payload
        if payload is None or operation.kind == "sample" or not track.attached:
            return False
        if not self._window.try_take(len(payload)):
            return False
        self._send(child, track, operation, payload)
        return True

    async def _pump(self, child: Child, track: Track) -> None:
        try:
            while track.order.ready and track.closed is None and not track.detaching and not self.stopped:
                if track.ordered and not track.attached:
                    await self.replay.attach(child, track)
                else:
                    await self._send_when_possible(child, track, track.order.ready[0])
                await child.room()
        except LinkClosed:
            await asyncio.Event().wait()  # the engine is gone, and this task is about to be cancelled
        except Corrupted as error:
            self.corrupt(track, str(error))
        except Exception:
            _log.exception("operations of a lane cannot be read; they are tried again")
            await asyncio.sleep(_AGAIN)
        finally:
            track.pump = None
        self.kick(track)
        self.let_go(track)

    async def _send_when_possible(self, child: Child, track: Track, operation: Operation) -> None:
        payload = await self._payload(operation)
        if operation.kind == "sample":
            payload = await self._with_source(track, operation, payload)
        await self._window.take(operation.tenant, len(payload))
        if track.closed is None and track.order.ready and track.order.ready[0] is operation:
            self._send(child, track, operation, payload)
        else:
            self._window.give(len(payload))

    async def _payload(self, operation: Operation) -> bytes:
        if operation.payload is not None:
            return operation.payload
        try:
            return await self._journal.payload(operation.id)
        except LookupError as error:
            raise Corrupted(f"what operation {operation.number} asks for is lost") from error

    async def _with_source(self, track: Track, operation: Operation, payload: bytes) -> bytes:
        sample = Sample.parse(payload)
        if sample.inflight is None:
            return payload
        sample.source = await self._effects.inflight_folder(operation.tenant, sample.inflight)
        if sample.source is None and operation in track.order.ready:
            track.order.ready.remove(operation)
            self.fail(operation, f"model {sample.inflight} has no inflight weights yet: save them first", "user")
        return sample.dump()

    def _send(self, child: Child, track: Track, operation: Operation, payload: bytes) -> None:
        track.order.ready.popleft()
        self.fly(child, Flight(operation, track, len(payload)), payload)
        operation.payload = None if operation.kind in PASSES or operation.kind == "sample" else payload

    def fly(self, child: Child, flight: Flight, payload: bytes, composition: str | None = None) -> None:
        """Send an operation, for which there is room in the window."""
        operation = flight.operation
        self.flights[operation.id] = flight
        flight.track.flying[operation.id] = flight
        head = {
            "id": operation.id,
            "lane": operation.lane,
            "number": operation.number,
            "kind": operation.kind,
            "tenant": operation.tenant,
            "tokens": operation.tokens,
            "alone": operation.attempts > 0 or self.replay.killed(operation),
            "replay": flight.replay,
        }
        if composition is not None:
            head["composition"] = composition
        child.put(Message(messages.RUN, head, payload))

    async def fly_again(
        self, child: Child, track: Track, operation: Operation, payload: bytes, composition: str | None
    ) -> None:
        """Send an operation of which only the effect is wanted."""
        await self._window.take(operation.tenant, len(payload))
        if track.closed is not None:
            self._window.give(len(payload))
            return
        self.replays += 1
        self.replayed()
        self.fly(child, Flight(operation, track, len(payload), replay=True), payload, composition)

    def land(self, operation: int) -> Flight | None:
        """Forget that the engine has an operation."""
        flight = self.flights.pop(operation, None)
        if flight is not None:
            flight.track.flying.pop(operation, None)
            self._window.give(flight.size)
        return flight

    def engine_up(self, child: Child) -> None:
        """Send to this engine from now on."""
        self.child = child
        for track in list(self.tracks.values()):
            self.kick(track)

    async def engine_down(self, blamed: set[int], why: str) -> None:
        """Take back what the engine had; what was under way for the second time has failed.

        Args:
            blamed: operations that were under way.
            why: what happened, for clients.
        """
        self.child = None
        pumps = [track.pump for track in self.tracks.values() if track.pump is not None]
        for pump in pumps:
            pump.cancel()
        if pumps:
            await asyncio.wait(pumps)
        for track in self.tracks.values():
            track.pump = None  # one that was cancelled before its first step did not say so itself
        counted = [number for number in blamed if number in self.flights and not self.flights[number].replay]
        if counted:
            self._outcomes.then(lambda: self._journal.blame(sorted(counted)))
        self.replay.engine_down(list(self.tracks.values()), blamed)
        for track in self.tracks.values():
            self._take_back(track, blamed, why)
        self.flights.clear()
        self._window = Window(self._window_bytes)
        await self._outcomes.flush()

    def _take_back(self, track: Track, blamed: set[int], why: str) -> None:
        track.leaving = track.leaving or track.detaching
        track.attached = track.detaching = False
        track.postponed = None  # a new engine may have what that one lacked
        again: list[Operation] = []
        for flight in track.flying.values():
            operation = flight.operation
            if flight.replay:
                continue
            operation.attempts += operation.id in blamed
            if operation.attempts > 1:
                self.fail(operation, f"{why}, twice while this was under way; it is not tried again")
            else:
                again.append(operation)
        track.flying.clear()
        track.order.ready.extendleft(reversed(again))
        self.let_go(track)

    def corrupt(self, track: Track, why: str) -> None:
        """Give a model up: nothing more runs in it, and what waits fails once its last checkpoint is known."""
        victims = [flight.operation for flight in track.flying.values() if not flight.replay] + track.order.drop_all()
        for number in list(track.flying):
            self.land(number)
        track.closed = Closed(f"this model cannot be made again: {why}", "server")
        self.forget_there(track)
        _log.error("model %s cannot be made again: %s", track.name, why)
        task = asyncio.create_task(self._bury(track, victims))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def forget_there(self, track: Track) -> None:
        """Let the engine free what it has of a model, without a snapshot."""
        track.attached = False
        self.tell(Message(messages.RESTORE, {"lane": track.name, "folder": None}))

    def tell(self, message: Message) -> None:
        """Send what an engine needs no longer know once it is gone."""
        if self.child is not None:
            with contextlib.suppress(LinkClosed):
                self.child.put(message)

    async def _bury(self, track: Track, victims: list[Operation]) -> None:
        reason = track.closed.reason if track.closed else ""
        try:
            last = await self._effects.last_checkpoint(track.tenant, track.name)
            reason += f"; its last good checkpoint is {last}" if last else "; it has no checkpoint"
        except Exception:
            _log.exception("the last checkpoint of a model cannot be found")
        track.closed = Closed(reason, "server")
        self._outcomes.then(lambda: self._effects.corrupted(track.tenant, track.name, reason))
        for operation in victims:
            self.fail(operation, reason)

    def let_go(self, track: Track) -> None:
        """Let the engine free a model that is to leave, if nothing of it runs."""
        if not track.leaving or track.running:
            return
        track.leaving = False
        if track.attached and self.child is not None:
            track.detaching = True
            self.tell(Message(messages.DETACH, {"lane": track.name}))
        elif track.closed is None:
            self._outcomes.then(lambda: self._effects.detached(track.tenant, track.name))

    async def track(self, lane: str, tenant: str, ordered: bool) -> Track:
        """Return a lane; one that is not in memory is read from the log."""
        found = self.tracks.get(lane)
        if found is not None:
            return found
        if not ordered:
            return self.tracks.setdefault(lane, Track(lane, tenant, ordered=False))
        return await self.replay.load(lane, tenant)

    @property
    def flying(self) -> int:
        """Operations that the engine has."""
        return len(self.flights)

    @property
    def restoring(self) -> int:
        """Models whose snapshot the engine is reading."""
        return sum(track.restoring is not None for track in self.tracks.values())

    def drop_idle(self) -> None:
        """Forget lanes in which nothing happens."""
        for name in [name for name, track in self.tracks.items() if track.idle]:
            del self.tracks[name]
