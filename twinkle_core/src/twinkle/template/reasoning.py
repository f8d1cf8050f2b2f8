"""Models whose chat template hides the reasoning of the last turn, or prompts otherwise than it shows a turn.

What is trained must be what follows the generation prompt, so their templates put the reasoning back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from twinkle.runtime import remote_class
from twinkle.template.base import Template
from twinkle.template.messages import parse_arguments, split_reasoning
from twinkle.template.rendering import ChatRenderer


@dataclass(frozen=True)
class ReasoningRenderer(ChatRenderer):
    """Shows the reasoning of a last turn that is the assistant's, as the model writes it after the generation prompt.

    Attributes:
        opening: the text that begins reasoning.
        closing: the text that ends it.
        empty: how the generation prompt says that there is to be none.
    """

    opening: str = ""
    closing: str = ""
    empty: str = ""

    def adapt(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages with their reasoning apart, and tool arguments as dicts."""
        return [parse_arguments(split_reasoning(message)) for message in messages]

    def prompt(self, messages: Sequence[dict[str, Any]]) -> str:
        """Return the generation prompt without the thought that it closes: the model may write one, or call a tool."""
        return super().prompt(messages).removesuffix(self.empty)

    def render(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = False) -> str:
        """Return the conversation as text, with the reasoning of its last turn."""
        text = super().render(messages, add_generation_prompt)
        *history, last = messages
        if add_generation_prompt or not history or last["role"] != "assistant":
            return text
        prompt = super().render(history, add_generation_prompt=True)
        header = prompt.removesuffix(self.empty).removesuffix(self.opening)
        if not text.startswith(header) or text.startswith(header + self.opening):
            return text  # the chat template shows it already
        reasoning = last.get("reasoning_content")
        if reasoning:
            thought = f"{self.opening}{reasoning}{self.closing}"
        else:
            thought = self.empty if self.enable_thinking or prompt != header else ""
        return header + thought + text[len(header) :]


@remote_class()
class DeepseekR1Template(Template):
    """DeepSeek-R1 and the models distilled from it: the prompt opens the reasoning, and the last turn shows it."""

    def _chat(self, **options: Any) -> ChatRenderer:
        return ReasoningRenderer(
            **options, opening="<think>\n", closing="\n</think>\n\n", empty="<think>\n\n</think>\n\n"
        )


@remote_class()
class Gemma4Template(Template):
    """Gemma 4: reasoning is a channel of its own; without thinking, the larger models' prompt opens and closes it."""

    def _chat(self, **options: Any) -> ChatRenderer:
        return ReasoningRenderer(
            **options, opening="<|channel>thought\n", closing="\n<channel|>", empty="<|channel>thought\n<channel|>"
        )
