"""`InProcessCheckpointEngine`: hands tensors from a trainer to a sampler of the same process."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from twinkle.checkpoint_engine import CheckpointEngine
from twinkle.errors import ArgumentError, TrainingStateError, Unsupported

Weights = Iterator[tuple[str, Tensor]]


@dataclass(slots=True, eq=False)
class _Transfer:
    """One transfer: the offered weights, and the receiver's confirmation."""

    offered: "Future[Weights]" = field(default_factory=Future)
    taken: "Future[None]" = field(default_factory=Future)

    def fail(self, error: BaseException) -> None:
        """Raise an error in threads that wait for the other side."""
        for future in (self.offered, self.taken):
            if not future.done():
                future.set_exception(error)


@dataclass(slots=True, eq=False)
class _Channel:
    """State shared by both sides: the next or current transfer."""

    transfer: _Transfer = field(default_factory=_Transfer)


class InProcessCheckpointEngine(CheckpointEngine):
    """Passes the sender's tensors to the receiver one by one on request, without copies.

    Tensors that are computed on request (for example merged weights) are computed in the receiver's thread. The sender
    must not change its tensors until the receiver has used them. Sender and receiver wait for each other, so they run
    in two threads, or as two tasks of one event loop.
    """

    reuses_memory = False

    def __init__(self) -> None:
        self._channel: _Channel | None = None

    def prepare(self) -> dict[str, Any]:
        """See `CheckpointEngine.prepare`."""
        return {"process": os.getpid()}

    @classmethod
    def build_topology(
        cls, trainer_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """See `CheckpointEngine.build_topology`.

        Raises:
            ArgumentError: there is more than one trainer or sampler.
            Unsupported: they live in different processes.
        """
        if (trainer_world_size, rollout_world_size) != (1, 1):
            raise ArgumentError(
                f"{cls.__name__} connects one trainer with one sampler, not {trainer_world_size} with "
                f"{rollout_world_size}; give each pair a manager of its own"
            )
        processes = sorted({entry["process"] for entry in metadata})
        if len(processes) > 1:
            raise Unsupported(
                f"{cls.__name__}: trainer and sampler live in the processes {processes}; between processes weights go "
                "by an engine that sends them (engine= of CheckpointEngineManager)"
            )
        channel = _Channel()
        return {"channel": [channel]}, {"channel": [channel]}

    def init_process_group(self, **kwargs: Any) -> None:
        """Join the channel that `build_topology` created."""
        self._channel = kwargs["channel"]

    def finalize(self) -> None:
        """Leave the channel; a waiting other side gets an error."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.transfer.fail(TrainingStateError("the other side left before the weights were transferred"))

    async def send_weights(self, weights: Weights) -> None:
        """Offer weights and wait until all of them were taken.

        Raises:
            TrainingStateError: the receiver stopped before the end, or has left.
        """
        transfer = self._joined().transfer
        if transfer.offered.done():
            transfer.offered.result()  # raises an error if the other side has left
            raise TrainingStateError("send_weights: the transfer before this one is not over")
        transfer.offered.set_result(iter(weights))
        await asyncio.wrap_future(transfer.taken)

    async def receive_weights(self) -> AsyncIterator[tuple[str, Tensor]]:
        """Yield each weight, the sender's own tensor.

        Raises:
            TrainingStateError: the sender has left.
        """
        channel = self._joined()
        transfer = channel.transfer
        weights = await asyncio.wrap_future(transfer.offered)
        error: BaseException | None = TrainingStateError("the receiver stopped before it had all weights")
        try:
            for item in weights:
                yield item
            error = None
        except Exception as failure:  # raised by the sender's iterator: the sender gets it too
            error = failure
            raise
        finally:
            channel.transfer = _Transfer()
            if error is not None:
                transfer.fail(error)
            elif not transfer.taken.done():
                transfer.taken.set_result(None)

    def _joined(self) -> _Channel:
        if self._channel is None:
            raise TrainingStateError(f"{type(self).__name__} is not connected; call init_process_group first")
        return self._channel
