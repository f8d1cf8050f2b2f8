"""Models whose chat template hides the reasoning of the last turn, or whose prompt differs from the rendered turn.

The trained text must be what follows the generation prompt, so these templates restore the reasoning.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from twinkle.data_format import split_reasoning
from twinkle.runtime import remote_class
from twinkle_chat.rendering import ChatRenderer
from twinkle_chat.template import Template


@dataclass(frozen=True)
class ReasoningRenderer(ChatRenderer):
    """Renders the last turn, if it is the assistant's, as the model generates it after its prompt.

    The text differs from the chat template's in two points. Reasoning of the row is shown in the last turn. If the
    generation prompt opens a thought, the last turn has it: with the row's reasoning, or closed immediately.

    Attributes:
        opening: the text that begins reasoning.
        closing: the text that ends it.
        empty: the thought of a last turn without reasoning whose prompt opens one; "" for none.
    """

    opening: str = ""
    closing: str = ""
    empty: str = ""

    def adapt(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages with separate reasoning, and with tool calls in the form that the chat template shows."""
        return self.adapt_calls([split_reasoning(message) for message in messages])

    def prompt(self, messages: Sequence[dict[str, Any]]) -> str:
        """Return the generation prompt without a closed thought: the model may write its own, or call a tool."""
        header, thought = self._header(super().prompt(messages))
        return header + thought if thought == self.opening else header

    def render(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = False) -> str:
        """Return the conversation as text, with the thought of its last turn."""
        text = super().render(messages, add_generation_prompt)
        *history, last = messages
        if add_generation_prompt or not history or last["role"] != "assistant":
            return text
        header, prompted = self._header(super().render(history, add_generation_prompt=True))
        if not text.startswith(header) or text.startswith(header + self.opening):
            return text  # the chat template shows it already
        reasoning = last.get("reasoning_content")
        if reasoning:
            thought = f"{self.opening}{reasoning}{self.closing}"
        else:
            thought = self.empty if prompted == self.opening else prompted
        return header + thought + text[len(header) :]

    def _header(self, prompt: str) -> tuple[str, str]:
        """Split a generation prompt into the turn's header and the thought that it opens, or opens and closes."""
        tags = re.escape(self.opening.rstrip()), re.escape(self.closing.strip())
        thought = re.search(rf"{tags[0]}\s*(?:{tags[1]}\s*)?\Z", prompt)
        return (prompt, "") if thought is None else (prompt[: thought.start()], thought[0])


@remote_class()
class DeepseekR1Template(Template):
    """DeepSeek-R1 and the models distilled from it: the prompt opens the reasoning, and the last turn shows it."""

    def _chat(self, **options: Any) -> ChatRenderer:
        return ReasoningRenderer(
            **options, opening="<think>\n", closing="\n</think>\n\n", empty="<think>\n\n</think>\n\n"
        )


@remote_class()
class Gemma4Template(Template):
    """Gemma 4: reasoning has its own channel; without thinking, the prompt of the larger models opens and closes it.

    The chat templates of the first revisions never show reasoning; here the last turn of a row has it.
    """

    def _chat(self, **options: Any) -> ChatRenderer:
        return ReasoningRenderer(**options, opening="<|channel>thought\n", closing="\n<channel|>")
