"""What the engine answers: results are written, and lanes go on, close, or are freed."""

import logging
from typing import Any

import orjson

from twinkle_server.engine import messages
from twinkle_server.engine.messages import Message
from twinkle_server.operations import Operation, Outcome, Snapshot
from twinkle_server.ports import Effects, Journal
from twinkle_server.runtime.dispatch import Dispatcher
from twinkle_server.runtime.outcomes import Outcomes
from twinkle_server.runtime.postponing import Postponing
from twinkle_server.runtime.replay import NEVER_MADE
from twinkle_server.runtime.tracks import Closed, Track

_log = logging.getLogger(__name__)
_LACKING = "memory or descriptors are lacking"


class Answers:
    """Takes the engine's messages about lanes.

    Args:
        dispatcher: knows what the engine has.
        journal: the log.
        outcomes: writes.
        effects: the rest of the store.
        postponing: puts models off.

    Attributes:
        unrecorded: folders of snapshots whose rows are not written yet.
    """

    def __init__(
        self, dispatcher: Dispatcher, journal: Journal, outcomes: Outcomes, effects: Effects, postponing: Postponing
    ) -> None:
        self._dispatcher = dispatcher
        self._postponing = postponing
        self.unrecorded: set[str] = set()
        self._journal = journal
        self._outcomes = outcomes
        self._effects = effects

    def done(self, message: Message) -> None:
        """Take the answer to an operation; one that was dropped meanwhile is nobody's."""
        flight = self._dispatcher.land(message.head["id"])
        if flight is None:
            return
        operation, track, error = flight.operation, flight.track, message.head.get("error")
        if not flight.replay:
            track.postponements = 0
            self._outcomes.put(operation, self._outcome(operation, message.head, message.body))
            self._follow(track, operation, failed=error is not None)
        elif error is None:
            self._dispatcher.replay.survived(operation)
        elif message.head.get("later"):
            self._postponing.put_off(track, _LACKING)
        else:
            self._dispatcher.corrupt(track, f"operation {operation.number} failed when it was done again: {error}")
        self._dispatcher.let_go(track)

    def _outcome(self, operation: Operation, head: dict[str, Any], body: bytes) -> Outcome:
        if head.get("error") is not None:
            return Outcome(operation.id, error=str(head["error"]), category=head.get("category") or "server")
        try:
            outcome = self._effects.done(operation, head.get("extra") or {}, body)
            outcome.composition = head.get("composition")
            return outcome
        except Exception:
            _log.exception("what operation %d did cannot be written", operation.id)
            return Outcome(operation.id, error="its result could not be written", category="server")

    def _follow(self, track: Track, operation: Operation, failed: bool) -> None:
        if failed and operation.kind == "create":
            self._dispatcher.close(track, NEVER_MADE)
            track.attached = False
        elif operation.kind == "unload" and not failed:
            self._dispatcher.close(track, Closed("this model was unloaded"))
            track.attached = False
            self._outcomes.then(self._effects.unloaded)
        elif not failed and _reads_checkpoint(operation):
            self._dispatcher.tell(Message(messages.SNAPSHOT, {"lane": track.name}))

    def restored(self, message: Message) -> None:
        """Take the answer to a RESTORE."""
        track = self._dispatcher.tracks.get(message.head["lane"])
        if track is None:
            return
        if track.restoring is not None and not track.restoring.done():
            track.restoring.set_result(None)
        track.restoring, track.restore_deaths = None, 0
        if track.postponed is not None:
            self._postponing.forgotten(track)
        elif message.head.get("later"):
            self._postponing.put_off(track, _LACKING)
        elif message.head.get("error") is not None and track.closed is None:
            _log.error("snapshot of model %s: %s", track.name, message.head["error"])
            self._dispatcher.corrupt(track, "its newest snapshot cannot be read")

    def snapshotted(self, message: Message) -> None:
        """Write that a snapshot is there, behind the outcomes of what it contains."""
        snapshot = Snapshot(**message.head)
        self.unrecorded.add(snapshot.folder)

        async def record() -> None:
            track = self._dispatcher.tracks.get(snapshot.lane)
            if track is not None and track.closed is not None:
                await self._effects.remove([snapshot.folder])
            else:
                await self._effects.remove(await self._journal.snapshotted(snapshot))
            self.unrecorded.discard(snapshot.folder)

        self._outcomes.then(record)

    def detached(self, message: Message) -> None:
        """Note that the engine let go of a model."""
        track = self._dispatcher.tracks.get(message.head["lane"])
        if track is None:
            return
        track.attached = track.detaching = False
        if track.closed is None and not track.order.ready:
            self._outcomes.then(lambda: self._effects.detached(track.tenant, track.name))
        self._dispatcher.kick(track)


def _reads_checkpoint(operation: Operation) -> bool:
    """Whether it cannot be done again once its checkpoint is deleted, so that a snapshot should cover it soon."""
    if operation.kind == "load":
        return True
    if operation.kind != "create" or operation.payload is None:
        return False
    return orjson.loads(operation.payload).get("source") is not None
