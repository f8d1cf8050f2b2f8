"""Chat templates: the contract `TemplateLike`, and every installed template by name."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from twinkle._registry import lazy_names
from twinkle.data_format import InputFeature, Trajectory

__all__ = ["TemplateLike"]


@runtime_checkable
class TemplateLike(Protocol):
    """Turns conversations into tokens and labels, and tokens back into text."""

    def encode(self, trajectory: Mapping[str, Any], add_generation_prompt: bool = False) -> InputFeature:
        """Return the encoded row of one conversation.

        Args:
            trajectory: `messages`, and `tools` if there are any.
            add_generation_prompt: end with the header of the assistant's next turn.

        Raises:
            EncodeError: the conversation cannot be rendered.
        """

    def batch_encode(self, trajectories: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False) -> Any:
        """Return the encoded rows of several conversations."""

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        """Return the text of tokens."""

    def format_trajectory(self, trajectory: Mapping[str, Any], add_default_system: bool = False) -> Trajectory:
        """Return the text of a conversation, rendered by the chat template."""

    def concat_input_feature(self, prompt_input_feature: Mapping[str, Any], new_tokens: Sequence[int]) -> InputFeature:
        """Append sampled tokens to an encoded prompt; the new tokens are trained."""


__getattr__, __dir__ = lazy_names(__name__, "template")
