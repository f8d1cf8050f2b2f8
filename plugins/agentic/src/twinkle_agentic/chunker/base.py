"""The contract of a chunker."""

from abc import ABC, abstractmethod

from twinkle.data_format import Trajectory
from twinkle_agentic.data_format import Chunks


class Chunker(ABC):
    """Divides a conversation into chunks."""

    @abstractmethod
    def __call__(self, trajectory: Trajectory) -> Chunks:
        """Return the chunks of a conversation, in order."""
