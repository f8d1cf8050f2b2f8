"""What the faces need of the service, and what the service needs of the store."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from twinkle_server.operations import Accepted, Category, Future, ModelInfo, Operation, Outcome, Snapshot, Submission

T = TypeVar("T")


class Database(Protocol):
    """Transactions. `work` is given a `sqlalchemy.Connection` and runs on a thread of the store, never on the loop."""

    async def write(self, work: Callable[[Any], T]) -> T:
        """Run `work` in a transaction that is durable when this returns; several share a commit, each whole or not."""

    async def read(self, work: Callable[[Any], T]) -> T:
        """Run `work`, which only reads."""


class Journal(Protocol):
    """The log of operations. Whatever it returns from is durable.

    Attributes:
        reads: operations whose outcome a client has read, and when.
    """

    reads: dict[int, float]

    async def submit(
        self, submission: Submission, also: Callable[[Any], None] | None = None
    ) -> tuple[Accepted, Operation]:
        """Write an operation, or find the one that came before under its number.

        Args:
            submission: what is asked for.
            also: what is written in the same transaction when the operation is new (the row of its model, say).

        Raises:
            SequenceConflict: another payload came before under that number.
        """

    async def finish(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Write how operations ended, all in one commit; returns them as they were written (an `also` may refuse)."""

    async def future(self, request: str, tenant: str) -> Future:
        """Return what is known of a future.

        Raises:
            NotFound: it was never given to this tenant.
            Gone: it was, and is no longer kept.
        """

    async def pending(self) -> list[Operation]:
        """Return every operation that is not over, by queue and number; without payloads."""

    async def after(self, queue_id: str, number: int) -> list[Operation]:
        """Return a queue's operations behind a number, in order; without payloads."""

    async def payload(self, operation: int) -> bytes:
        """Return the payload of an operation.

        Raises:
            LookupError: a snapshot covers it, and it is gone.
        """

    async def composition(self, operation: int) -> str | None:
        """Return how the passes of an operation were composed; None where that was not recorded."""

    async def blame(self, operations: Sequence[int]) -> None:
        """Count that the engine died while these were under way."""

    async def snapshotted(self, snapshot: Snapshot) -> list[str]:
        """Make a snapshot the queue's newest, drop the payloads that it covers, and return older snapshots' folders."""

    async def snapshot(self, queue_id: str) -> Snapshot | None:
        """Return a queue's newest snapshot."""


class Effects(Protocol):
    """What operations change in the store beside the log, and what the log alone does not know."""

    def done(self, operation: Operation, extra: dict[str, Any], body: bytes) -> Outcome:
        """Return the outcome of an operation that the engine has done, with what is written beside it (`also`)."""

    async def closed(self, tenant: str, model: str) -> tuple[str, Category] | None:
        """Return why a model takes no more operations, and whose fault that is; None if it does."""

    async def attached(self, tenant: str, model: str) -> None:
        """Note that the engine has a model again."""

    async def detached(self, tenant: str, model: str) -> None:
        """Note that only a model's snapshot and log are kept."""

    async def gone(self, tenant: str, model: str, reason: str) -> None:
        """Note that nothing of a model is kept, and remove its snapshot."""

    async def unloaded(self) -> None:
        """Remove the snapshots of models whose unload was just written."""

    async def corrupted(self, tenant: str, model: str, reason: str) -> None:
        """Note that a model cannot be made again."""

    async def last_checkpoint(self, tenant: str, model: str) -> str | None:
        """Return the path of a model's newest checkpoint for training."""

    async def inflight_folder(self, tenant: str, model: str) -> str | None:
        """Return the folder of the weights that a model's inflight sampling sessions use now."""

    async def remove(self, folders: Sequence[str]) -> None:
        """Remove folders of snapshots; ones that are not there are no error."""


class Figures(Protocol):
    """Who counts what happens."""

    def finished(self, kind: str, outcome: str, seconds: float, tokens: int, tenant: str) -> None:
        """An operation is over: "done", "cancelled", or whose fault a failure was; seconds since it was taken."""

    def passed(self, head: Mapping[str, Any]) -> None:
        """The engine had a turn, as its message `passed` tells it."""

    def restored(self) -> None:
        """A model came into the engine again."""

    def detached(self) -> None:
        """A model left the engine."""

    def replayed(self, count: int = 1) -> None:
        """Operations were done again."""

    def restarted(self, reason: str) -> None:
        """The engine was started again, for a reason of few words."""

    def snapshotted(self, size: int) -> None:
        """A snapshot of so many bytes was written."""

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Show a figure that is read when it is asked for."""


class Service(Protocol):
    """The running service, as the faces see it."""

    @property
    def info(self) -> ModelInfo:
        """The base model, as the engine found it; its sizes are 0 until then."""

    async def submit(self, submission: Submission, also: Callable[[Any], None] | None = None) -> Accepted:
        """Write an operation into the log and let it run in its turn; returns when it is durable, not when done."""

    async def wait(self, request: str, tenant: str, seconds: float) -> Future:
        """Return a future as soon as it is over, or what it is after so many seconds."""

    async def cancel(self, request: str, tenant: str) -> None:
        """Drop an operation that has not begun; a sampling request is dropped while it runs, too."""

    def awaited(self, submission: Submission) -> bool:
        """Return whether others of its queue wait for its number: to turn it away would hold them up, and so itself."""

    def queue_state(self, queue_id: str) -> tuple[str, str | None]:
        """Return "active", "paused_capacity" or "paused_rate_limit", and why a future of this queue waits."""

    async def finish_session(self, session: str) -> None:
        """Snapshot and free the models of a session that ends, and fail what still waits in its queues."""

    async def submit_next(self, submission: Submission) -> Accepted:
        """Submit under the queue's next free number (legacy unload carries none)."""

    async def heartbeat(self, session: str, tenant: str) -> None:
        """Say that a session's client lives.

        Raises:
            Gone: it is unknown, another tenant's, finished or expired.
        """
