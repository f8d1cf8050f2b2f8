"""GLM-4: the model ends its turn with the token that opens the next one, and the last turn of a row has none."""

from collections.abc import Sequence
from typing import Any

from twinkle.runtime import remote_class
from twinkle_chat.rendering import ChatRenderer
from twinkle_chat.template import Template


class _ClosingRenderer(ChatRenderer):
    def render(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = False) -> str:
        text = super().render(messages, add_generation_prompt)
        if add_generation_prompt or messages[-1]["role"] != "assistant":
            return text
        return text + ("<|observation|>" if messages[-1].get("tool_calls") else "<|user|>")


@remote_class()
class Glm4Template(Template):
    """GLM-4 and GLM-Edge: the last turn ends with `<|user|>`, or after tool calls with `<|observation|>`.

    These are the tokens at which the models stop to generate; their chat template writes them only before a next turn.
    """

    def _chat(self, **options: Any) -> ChatRenderer:
        return _ClosingRenderer(**options)
