"""Renders messages to text with a tokenizer's chat template, and explains failures."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from twinkle.data_format import split_reasoning
from twinkle.errors import EncodeError
from twinkle_chat.messages import (
    dump_arguments,
    function_of,
    inline_reasoning,
    parse_arguments,
    silent,
)

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
        """Whether the chat template marks the assistant's text by `{% generation %}`."""
        return _GENERATION.search(self.source) is not None

    def adapt(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages in the form that this chat template expects, for reasoning and tool calls."""
        inlined = [inline_reasoning(message) for message in messages]
        if not _REASONING.search(self.source):
            return self.adapt_calls(inlined)
        adapted = self.adapt_calls([split_reasoning(message) for message in messages])
        reasoning = adapted[-1].get("reasoning_content", "").strip()
        thinking = replace(self, enable_thinking=True)  # without, some show none on purpose
        if not reasoning or adapted[-1]["role"] != "assistant" or thinking._says(adapted, reasoning) is not False:
            return adapted  # a refusal is the chat template's own, and no reason for another form
        inlined = self.adapt_calls(inlined)  # it names reasoning, but reads it in another form
        return inlined if thinking._says(inlined, reasoning) else adapted

    def adapt_calls(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages whose tool calls have the form that this chat template shows.

        Arguments are dicts, or JSON text where the chat template does not write dicts as JSON. A turn that only calls
        tools has the content "", or None where the chat template then writes less: some take "" for an answer beside
        the calls, or show no call beside any content. Where no form shows all calls, the messages have the one that
        shows most, of equal ones the first.
        """
        if not any(message.get("tool_calls") for message in messages):
            return list(messages)
        forms: list[list[dict[str, Any]]] = []
        for arguments in (parse_arguments, dump_arguments):
            form = [arguments(message) for message in messages]
            tries = [form, silent(form)] if silent(form) != form else [form]
            shown = [(text, each) for each in tries if (text := self._shows(each)) is not None]
            if shown:
                return min(shown, key=lambda pair: len(pair[0]))[1]
            forms += tries
        return max(forms, key=self._names_shown)

    def _names_shown(self, messages: Sequence[dict[str, Any]]) -> int:
        """Return how often the conversation as text has the names of called tools; -1 where it is refused."""
        names = {function_of(call)["name"] for message in messages for call in message.get("tool_calls") or ()}
        try:
            text = self.render(messages)
        except EncodeError:
            return -1
        return sum(text.count(name) for name in names)

    def _says(self, messages: Sequence[dict[str, Any]], words: str) -> bool | None:
        """Say whether the conversation as text has some words in it; None where it is refused."""
        try:
            return words in self.render(messages)
        except EncodeError:
            return None

    def _shows(self, messages: Sequence[dict[str, Any]]) -> str | None:
        """Return the conversation as text if it has every tool call in it, its arguments as JSON or in other markup."""
        try:
            text = self.render(messages)
        except EncodeError as error:
            if isinstance(error.__cause__, RecursionError):
                raise  # too deep in any form
            return None
        for message in messages:
            for call in message.get("tool_calls") or ():
                function = function_of(call)
                arguments = function.get("arguments")
                if function["name"] not in text or (
                    isinstance(arguments, dict) and arguments and str(arguments) in text
                ):
                    return None  # the representation of a dict in Python is not JSON
        return text

    def render(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = False) -> str:
        """Return the conversation as text.

        Raises:
            EncodeError: the chat template refuses the conversation; the message has its reason, and the cause is kept.
        """
        if any(message["content"] is None for message in messages):
            return self._jinja(messages, add_generation_prompt=add_generation_prompt)[0]
        with _refusals():
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
        text, spans = self._jinja(messages, return_assistant_tokens_mask=True)
        return text, [(int(start), int(end)) for start, end in spans]

    def _jinja(self, messages: Sequence[dict[str, Any]], **options: Any) -> tuple[str, Sequence[Any]]:
        """Render without the tokenizer, which drops keys with the value None: some chat templates test for None."""
        from transformers.utils.chat_template_utils import render_jinja_template

        special: Mapping[str, Any] = self.tokenizer.special_tokens_map
        variables = {**special, "enable_thinking": self.enable_thinking, **self.variables}
        with _refusals():
            texts, spans = render_jinja_template(
                conversations=[list(messages)], tools=self.tools, chat_template=self.source, **options, **variables
            )
        return str(texts[0]), spans[0] if spans else ()


@contextmanager
def _refusals() -> Iterator[None]:
    """Raise what a chat template raises as an `EncodeError`."""
    from jinja2 import TemplateError

    try:
        yield
    except (TemplateError, TypeError, ValueError, RecursionError) as error:
        raise EncodeError(f"the chat template refuses this conversation: {error}") from error
