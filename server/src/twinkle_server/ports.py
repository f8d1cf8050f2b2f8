"""Protocols between the parts of the service: the endpoints, the runtime, the store, and telemetry."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from twinkle_server.operations import (
    Accepted,
    Category,
    Embed,
    Future,
    Generate,
    ModelInfo,
    Operation,
    Outcome,
    Snapshot,
    Submission,
)

if TYPE_CHECKING:
    from twinkle_server.runtime.generations import Generation

T = TypeVar("T")


class Database(Protocol):
    """Runs transactions. `work` gets a `sqlalchemy.Connection` and runs on a thread of the store, never on the loop."""

    async def write(self, work: Callable[[Any], T]) -> T:
        """Run `work` in a transaction that is durable when this returns; several share a commit, each atomically."""

    async def read(self, work: Callable[[Any], T]) -> T:
        """Run `work`, which only reads."""


class Journal(Protocol):
    """The operation log. All writes are durable when they return.

    Attributes:
        reads: time at which a client read the outcome of an operation, by operation.
    """

    reads: dict[int, float]

    async def submit(
        self, submission: Submission, in_transaction: Callable[[Any], None] | None = None
    ) -> tuple[Accepted, Operation]:
        """Write an operation, or return the earlier one of the same number.

        Args:
            submission: the operation.
            in_transaction: called in the transaction that writes the operation, if it is new; it may write the row of
                its model, for example.

        Raises:
            SequenceConflict: the number was used with another payload.
        """

    async def finish(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Write outcomes in one commit; return them as written (a function `in_transaction` may refuse)."""

    async def future(self, request: str, tenant: str) -> Future:
        """Return the state of a future.

        Raises:
            NotFound: the tenant has no such request.
            Gone: its result is no longer kept.
        """

    async def pending(self) -> list[Operation]:
        """Return all pending operations by queue and number, without payloads."""

    async def after(self, queue_id: str, number: int) -> list[Operation]:
        """Return a queue's operations after a number in order, without payloads."""

    async def payload(self, operation: int) -> bytes:
        """Return the payload of an operation.

        Raises:
            LookupError: it was deleted, because a snapshot covers the operation.
        """

    async def composition(self, operation: int) -> str | None:
        """Return the composition of an operation's passes; None if it was not recorded."""

    async def blame(self, operations: Sequence[int]) -> None:
        """Count a death of the engine for the operations that were running."""

    async def snapshotted(self, snapshot: Snapshot) -> list[str]:
        """Record a snapshot as the queue's newest, delete the payloads that it covers, and return unneeded folders."""

    async def snapshot(self, queue_id: str) -> Snapshot | None:
        """Return a queue's newest snapshot."""


class Effects(Protocol):
    """Effects of operations on the store besides the log, and state of models that the log does not have."""

    def done(self, operation: Operation, extra: dict[str, Any], body: bytes) -> Outcome:
        """Return the outcome of an operation from the engine's answer, including its function `in_transaction`."""

    async def closed(self, tenant: str, model: str) -> tuple[str, Category] | None:
        """Return why a model accepts no operations, and the category; None if it accepts them."""

    async def attached(self, tenant: str, model: str) -> None:
        """Record that the engine has a model."""

    async def detached(self, tenant: str, model: str) -> None:
        """Record that only the snapshot and the log of a model are kept."""

    async def gone(self, tenant: str, model: str, reason: str) -> None:
        """Record that a model no longer exists, and remove its snapshot."""

    async def unloaded(self) -> None:
        """Remove the snapshots of models whose unload was just written."""

    async def corrupted(self, tenant: str, model: str, reason: str) -> None:
        """Record that a model cannot be restored."""

    async def last_checkpoint(self, tenant: str, model: str) -> str | None:
        """Return the path of a model's newest checkpoint for training."""

    async def inflight_folder(self, tenant: str, model: str) -> str | None:
        """Return the folder of the weights that a model's inflight sampling sessions currently use."""

    async def remove(self, folders: Sequence[str]) -> None:
        """Remove folders of snapshots; missing folders are ignored."""


class Figures(Protocol):
    """Counts events for metrics."""

    def finished(self, kind: str, outcome: str, seconds: float, tokens: int, tenant: str) -> None:
        """An operation ended: "done", "cancelled", or the category of its failure; `seconds` since its submission."""

    def passed(self, head: Mapping[str, Any]) -> None:
        """The engine ended a pass, described by the head of its message `passed`."""

    def progressed(self, head: Mapping[str, Any]) -> None:
        """The engine has computed a part of its passes, described by the head of its message `progress`."""

    def restored(self) -> None:
        """A model was restored in the engine."""

    def detached(self) -> None:
        """A model was freed by the engine."""

    def replayed(self, count: int = 1) -> None:
        """Operations were replayed."""

    def restarted(self, reason: str) -> None:
        """The engine was restarted; `reason` is a label."""

    def snapshotted(self, size: int) -> None:
        """A snapshot of `size` bytes was written."""

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a gauge whose value is read on every scrape."""


class Tracer(Protocol):
    """Follows operations for traces."""

    def accepted(self, operation: Operation) -> None:
        """An operation was written to the log; called within the request."""

    def began(self, operations: Collection[int]) -> None:
        """The engine runs operations, given by their ids."""

    def passed(self, head: Mapping[str, Any]) -> None:
        """The engine ended a pass, described by the head of its message `passed`."""

    def ended(self, operation: Operation, outcome: str) -> None:
        """An operation ended: "done", "cancelled", or the category of its failure."""


class Service(Protocol):
    """The running service, as used by endpoints."""

    @property
    def info(self) -> ModelInfo:
        """The base model; its sizes are 0 until the engine is ready."""

    async def submit(self, submission: Submission, in_transaction: Callable[[Any], None] | None = None) -> Accepted:
        """Write an operation into the log and queue it; return when it is durable, not when it is done."""

    async def wait(self, request: str, tenant: str, seconds: float) -> Future:
        """Return a future when it is resolved, or its current state after `seconds`."""

    async def generate(self, tenant: str, generate: Generate | Embed) -> "Generation":
        """Send a streamed request to the engine; it is not written to the log."""

    async def cancel(self, request: str, tenant: str) -> None:
        """Cancel an operation that has not begun; sampling requests are cancelled while they run, too."""

    def awaited(self, submission: Submission) -> bool:
        """Return whether later operations of the queue wait for this number; refusing it would block them."""

    def queue_state(self, queue_id: str) -> tuple[str, str | None]:
        """Return "active", "paused_capacity" or "paused_rate_limit", and why a future of this queue waits."""

    async def reserve(self, tenant: str, model: str) -> None:
        """Reserve the service for a full-parameter model, until it is unloaded or its session ends.

        Raises:
            Locked: another has it, or other tenants have models in use.
        """

    async def finish_session(self, session: str) -> None:
        """Snapshot and free the models of a finished session, and fail what waits in its queues."""

    async def submit_next(self, submission: Submission) -> Accepted:
        """Submit under the queue's next free number (legacy unload requests have none)."""

    async def heartbeat(self, session: str, tenant: str) -> None:
        """Record a heartbeat of a session.

        Raises:
            Gone: the tenant has no such session, or it has finished or expired.
        """
