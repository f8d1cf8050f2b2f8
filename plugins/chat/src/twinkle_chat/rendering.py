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
    """Return the text of each special token, including those without a named role (`<|eot_id|>`).

    It iterates over all added tokens, of which some tokenizers have thousands, so callers cache the result.
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
        chat_template: Jinja text that replaces the tokenizer's own.
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
        thinking = replace(self, enable_thinking=True)  # without thinking, some templates hide reasoning on purpose
        if not reasoning or adapted[-1]["role"] != "assistant" or thinking._contains(adapted, reasoning) is not False:
            return adapted  # the chat template refuses the conversation in any form
        inlined = self.adapt_calls(inlined)  # the template handles reasoning, but in another form
        return inlined if thinking._contains(inlined, reasoning) else adapted

    def adapt_calls(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages whose tool calls have the form that this chat template shows.

        Arguments are dicts, or JSON text if the chat template does not write dicts as JSON. A turn that only calls
        tools has the content "", or None if the chat template then writes less: some templates take "" for an answer
        beside the calls, or show no call beside any content. If no form shows all calls, the first one that shows the
        most is used.
        """
        if not any(message.get("tool_calls") for message in messages):
            return list(messages)
        forms: list[list[dict[str, Any]]] = []
        for arguments in (parse_arguments, dump_arguments):
            form = [arguments(message) for message in messages]
            candidates = [form, silent(form)] if silent(form) != form else [form]
            rendered = [(text, c) for c in candidates if (text := self._shows(c)) is not None]
            if rendered:
                return min(rendered, key=lambda pair: len(pair[0]))[1]
            forms += candidates
        return max(forms, key=self._names_shown)

    def _names_shown(self, messages: Sequence[dict[str, Any]]) -> int:
        """Return how often names of called tools occur in the rendered conversation; -1 if the template refuses it."""
        names = {function_of(call)["name"] for message in messages for call in message.get("tool_calls") or ()}
        try:
            text = self.render(messages)
        except EncodeError:
            return -1
        return sum(text.count(name) for name in names)

    def _contains(self, messages: Sequence[dict[str, Any]], words: str) -> bool | None:
        """Return whether a text occurs in the rendered conversation; None if the template refuses it."""
        try:
            return words in self.render(messages)
        except EncodeError:
            return None

    def _shows(self, messages: Sequence[dict[str, Any]]) -> str | None:
        """Return the rendered conversation if it shows every tool call, with arguments as JSON or in other markup."""
        try:
            text = self.render(messages)
        except EncodeError as error:
            if isinstance(error.__cause__, RecursionError):
                raise  # nested too deeply in any form
            return None
        for message in messages:
            for call in message.get("tool_calls") or ():
                function = function_of(call)
                arguments = function.get("arguments")
                if function["name"] not in text or (
                    isinstance(arguments, dict) and arguments and str(arguments) in text
                ):
                    return None  # arguments were written as a Python repr, which is not JSON
        return text

    def render(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = False) -> str:
        """Return the conversation as text.

        Raises:
            EncodeError: the chat template refuses the conversation; the message has the reason, and `__cause__` the
                error.
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
        """Return the text that ends with the generation prompt, after which the next assistant turn begins.

        Raises:
            EncodeError: the chat template refuses the conversation.
        """
        return self.render(messages, add_generation_prompt=True)

    def render_marked(self, messages: Sequence[dict[str, Any]]) -> tuple[str, list[Span]]:
        """Return the rendered conversation and the spans inside `{% generation %}` blocks, in characters.

        Spans are used instead of transformers' token mask, which loses the last bytes of a block that ends inside a
        character of several tokens.
        """
        text, spans = self._jinja(messages, return_assistant_tokens_mask=True)
        return text, [(int(start), int(end)) for start, end in spans]

    def _jinja(self, messages: Sequence[dict[str, Any]], **options: Any) -> tuple[str, Sequence[Any]]:
        """Render without the tokenizer, which drops keys with the value None; some chat templates test for None."""
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
    """Raise exceptions of a chat template as `EncodeError`."""
    from jinja2 import TemplateError

    try:
        yield
    except (TemplateError, TypeError, ValueError, RecursionError) as error:
        raise EncodeError(f"the chat template refuses this conversation: {error}") from error
