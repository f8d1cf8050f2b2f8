"""GLM-4: a turn ends with the token that opens the next one; this template adds it to the last turn of a row."""

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

    The models stop at these tokens; their chat template writes them only before another turn.
    """

    def _chat(self, **options: Any) -> ChatRenderer:
        return _ClosingRenderer(**options)
