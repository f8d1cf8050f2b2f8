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
    """One transfer: what the sender offers, and the receiver's word that it has all."""

    offered: "Future[Weights]" = field(default_factory=Future)
    taken: "Future[None]" = field(default_factory=Future)

    def fail(self, error: BaseException) -> None:
        """Tell whoever waits."""
        for future in (self.offered, self.taken):
            if not future.done():
                future.set_exception(error)


@dataclass(slots=True, eq=False)
class _Channel:
    """What both sides hold: the transfer that is next, or under way."""

    transfer: _Transfer = field(default_factory=_Transfer)


class InProcessCheckpointEngine(CheckpointEngine):
    """Gives the receiver the sender's own tensors, one by one as it asks for them; nothing is copied on the way.

    What the sender computes as it is asked (a merged weight, say) is computed by the receiver. The sender must leave
    its tensors alone until the receiver has used them. Sender and receiver wait for each other, so they run in two
    threads, or as two tasks of one event loop.
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
        """Take the channel that `build_topology` made."""
        self._channel = kwargs["channel"]

    def finalize(self) -> None:
        """Leave the channel; whoever waits at its other end is told."""
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
            transfer.offered.result()  # raises where the other side has left
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
        except Exception as failure:  # of the sender's own making: it is told what it raised here
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
