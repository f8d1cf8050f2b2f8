"""Messages of the engine about models: results are written, and queues go on, close, or are released."""

import logging
from typing import Any

import orjson

from twinkle_server.engine import messages
from twinkle_server.engine.messages import Message
from twinkle_server.operations import Operation, Outcome, Snapshot
from twinkle_server.ports import Effects, Journal
from twinkle_server.runtime.dispatch import NEVER_CREATED, Dispatcher
from twinkle_server.runtime.outcomes import Outcomes
from twinkle_server.runtime.queues import Closed, ModelQueue, State

_log = logging.getLogger(__name__)
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
