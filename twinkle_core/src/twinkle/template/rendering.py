"""Renders messages to text with a tokenizer's chat template, and says what went wrong when it cannot."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from twinkle.errors import EncodeError
from twinkle.template.messages import inline_reasoning, parse_arguments, split_reasoning

Span = tuple[int, int]
_REASONING = re.compile(r"reasoning_content|\.(?:thinking|reasoning)\b|\[['\"](?:thinking|reasoning)['\"]\]")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def special_tokens(tokenizer: Any) -> frozenset[str]:
    """Return the text of each special token, those included that have no role of their own (`<|eot_id|>`).

    It walks over all added tokens, of which some tokenizers have thousands, so callers keep the result.
    """
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return frozenset(added | {tokenizer.eos_token}) - {None, ""}


@dataclass(frozen=True)
class ChatRenderer:
    """One tokenizer's chat template with the options of one conversation.

    Attributes:
        tokenizer: a transformers tokenizer.
        tools: the conversation's tools, or None.
        enable_thinking: the template variable of that name.
        special_tokens: the text of each of the tokenizer's special tokens.
        chat_template: Jinja text to use instead of the tokenizer's own.
        variables: further variables of the chat template.
    """

    tokenizer: Any
    tools: Sequence[Mapping[str, Any]] | None = None
    enable_thinking: bool = True
    special_tokens: frozenset[str] = frozenset()
    chat_template: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """The Jinja text of the chat template.

        Raises:
            EncodeError: the tokenizer has none.
        """
        try:
            return str(self.tokenizer.get_chat_template(self.chat_template, tools=self.tools))
        except ValueError as error:
            raise EncodeError(
                "the tokenizer has no chat template; pass use_chat_template=False to train on plain text, "
                "or set tokenizer.chat_template"
            ) from error

    @property
    def marks_generation(self) -> bool:
        """Whether the chat template itself says what the assistant writes, by `{% generation %}`."""
        return _GENERATION.search(self.source) is not None

    def adapt(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages in the dialect of this chat template: where reasoning goes, and the form of arguments."""
        source = self.source
        reasoning = split_reasoning if _REASONING.search(source) else inline_reasoning
        adapted = [reasoning(message) for message in messages]
        return [parse_arguments(message) for message in adapted] if "tojson" in source else adapted

    def render(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = False) -> str:
        """Return the conversation as text.

        Raises:
            EncodeError: the chat template refuses the conversation; the cause is kept.
        """
        from jinja2 import TemplateError

        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages),
                    tools=self.tools,
                    chat_template=self.chat_template,
                    add_generation_prompt=add_generation_prompt,
                    enable_thinking=self.enable_thinking,
                    tokenize=False,
                    **self.variables,
                )
            )
        except (TemplateError, TypeError, ValueError, RecursionError) as error:
            raise EncodeError(f"the chat template refuses this conversation: {error}") from error

    def prompt(self, messages: Sequence[dict[str, Any]]) -> str:
        """Return the text after which every next turn of the assistant begins, whether it thinks or not.

        Raises:
            EncodeError: the chat template refuses the conversation.
        """
        return self.render(messages, add_generation_prompt=True)

    def render_marked(self, messages: Sequence[dict[str, Any]]) -> tuple[str, list[Span]]:
        """Return the conversation as text with the spans inside `{% generation %}` blocks, in characters.

        The spans are used rather than transformers' token mask, because that loses the last bytes of a block that ends
        inside a character of several tokens.
        """
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        special: Mapping[str, Any] = self.tokenizer.special_tokens_map
        variables = {**special, "enable_thinking": self.enable_thinking, **self.variables}
        try:
            texts, spans = render_jinja_template(
                conversations=[list(messages)],
                tools=self.tools,
                chat_template=self.source,
                return_assistant_tokens_mask=True,
                **variables,
            )
        except (TemplateError, TypeError, ValueError, RecursionError) as error:
            raise EncodeError(f"the chat template refuses this conversation: {error}") from error
        return texts[0], [(int(start), int(end)) for start, end in spans[0]]
