# Written by `twinkle plugins types`; do not edit.
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



from twinkle_chat.deepseek_v4 import DeepseekV4Template as DeepseekV4Template
from twinkle_chat.glm4 import Glm4Template as Glm4Template
from twinkle_chat.reasoning import DeepseekR1Template as DeepseekR1Template
from twinkle_chat.reasoning import Gemma4Template as Gemma4Template
from twinkle_chat.rendering import ChatRenderer as ChatRenderer
from twinkle_chat.template import Template as Template
from twinkle_chat.template import Template as _DeepseekTemplate
from twinkle_chat.template import Template as _Qwen2Template
from twinkle_chat.template import Template as _Qwen2_5Template
from twinkle_chat.template import Template as _Qwen3Template
from twinkle_chat.template import Template as _Qwen3_5Template
from twinkle_chat.template import append_tokens as append_tokens
from twinkle_chat.turns import turn_span as turn_span
DeepseekTemplate = _DeepseekTemplate
Qwen2Template = _Qwen2Template
Qwen2_5Template = _Qwen2_5Template
Qwen3Template = _Qwen3Template
Qwen3_5Template = _Qwen3_5Template
