"""What the faces need of the service, and what the service needs of the store."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from twinkle_server.operations import Accepted, Future, ModelInfo, Operation, Outcome, Snapshot, Submission

T = TypeVar("T")


class Database(Protocol):
    """Transactions. `work` is given a `sqlalchemy.Connection` and runs on a thread of the store, never on the loop."""

    async def write(self, work: Callable[[Any], T]) -> T:
        """Run `work` in a transaction that is durable when this returns; several share one commit, each whole or not."""

    async def read(self, work: Callable[[Any], T]) -> T:
        """Run `work`, which only reads."""


class Journal(Protocol):
    """The log of operations. Whatever it returns from is durable."""

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
        """Return every operation that is not over, by lane and number; without payloads."""

    async def after(self, lane: str, number: int) -> list[Operation]:
        """Return a lane's operations behind a number, in order; without payloads."""

    async def payload(self, operation: int) -> bytes:
        """Return the payload of an operation.

        Raises:
            LookupError: a snapshot covers it, and it is gone.
        """

    async def blame(self, operations: Sequence[int]) -> None:
        """Count that the engine died while these were under way."""

    async def snapshotted(self, snapshot: Snapshot) -> list[str]:
        """Make a snapshot the lane's newest, drop the payloads that it covers, and return older snapshots' folders."""

    async def snapshot(self, lane: str) -> Snapshot | None:
        """Return a lane's newest snapshot."""


class Service(Protocol):
    """The running service, as the faces see it."""

    info: ModelInfo

    async def submit(self, submission: Submission, also: Callable[[Any], None] | None = None) -> Accepted:
        """Write an operation into the log and let it run in its turn; returns when it is durable, not when it is done."""

    async def wait(self, request: str, tenant: str, seconds: float) -> Future:
        """Return a future as soon as it is over, or what it is after so many seconds."""

    async def cancel(self, request: str, tenant: str) -> None:
        """Drop an operation that has not begun; a sampling request is dropped while it runs, too."""

    def queue_state(self, lane: str) -> tuple[str, str | None]:
        """Return "active", "paused_capacity" or "paused_rate_limit", and why a future of this lane waits."""

    async def finish_session(self, session: str) -> None:
        """Snapshot and free the models of a session that ends, and fail what still waits in its lanes."""

    async def submit_next(self, submission: Submission) -> Accepted:
        """Submit under the lane's next free number (legacy unload carries none)."""
