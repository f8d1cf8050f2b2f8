"""The contract of a chat model behind an interface, and the error of one that does not answer."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from twinkle.data_format import Message, SamplingParams, Trajectory
from twinkle.errors import TwinkleError


class APIError(TwinkleError, ConnectionError):
    """A service did not answer, or refused.

    Attributes:
        refused: whether it would refuse every call (a key, an address or a model that is wrong).
    """

    def __init__(self, message: str, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class API(ABC):
    """Answers conversations. Its calls come from several threads at once."""

    @abstractmethod
    def __call__(
        self, trajectory: Trajectory, sampling_params: SamplingParams | Mapping[str, Any] | None = None, **kwargs: Any
    ) -> Message | list[Message]:
        """Return the next turn of the assistant, or a list of them for `num_samples` above 1.

        A message may have `finish_reason` (`stop`, `length` or `tool_calls`).

        Args:
            trajectory: the conversation, and `tools` where there are any.
            sampling_params: how to draw.
            **kwargs: further arguments of a service.

        Raises:
            APIError: there is no answer.
        """
