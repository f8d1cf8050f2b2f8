"""The contract of a checkpoint engine."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch


class CheckpointEngine(ABC):
    """Moves weights from a trainer to a sampler, in buckets, without going through disk.

    Attributes:
        reuses_memory: whether a received tensor is overwritten by later ones, so that the receiver must copy it to
            keep it.
    """

    reuses_memory: ClassVar[bool] = True

    @abstractmethod
    def prepare(self) -> dict[str, Any]:
        """Allocate the resources of a transfer; returns the metadata for `build_topology`."""

    @classmethod
    @abstractmethod
    def build_topology(
        cls, trainer_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the keyword arguments of `init_process_group` for trainer and sampler ranks."""

    @abstractmethod
    def init_process_group(self, **kwargs: Any) -> None:
        """Join the transfer group."""

    @abstractmethod
    def finalize(self) -> None:
        """Release what `prepare` allocated; if the other side still waits for this one, its transfer fails."""

    @abstractmethod
    async def send_weights(self, weights: "Iterator[tuple[str, torch.Tensor]]") -> None:
        """Send every (name, tensor)."""

    @abstractmethod
    def receive_weights(self) -> "AsyncIterator[tuple[str, torch.Tensor]]":
        """Yield every (name, tensor) as it arrives."""
