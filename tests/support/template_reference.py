"""What is trained of a conversation, from renderings of its prefixes: a reference for labels, independent of them.

`render(messages[:i], add_generation_prompt=True)` is where turn i starts, and `render(messages[:i + 1])` where it ends,
if the first is a prefix of the whole text and the second of it, too. Where a chat template is not stable in this way, a
rule below says what is done instead; where no rule fits, `NoReference` is raised.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import UndefinedError
from transformers.utils.chat_template_utils import render_jinja_template

Messages = Sequence[Mapping[str, Any]]
Span = tuple[int, int]

_OPENED = re.compile(r"(<think>|\[THINK\]|<\|channel>thought|</think>)\s*(</think>|\[/THINK\]|<channel\|>)?\s*\Z")
_CLOSED = re.compile(r"(</think>|\[/THINK\]|<channel\|>)\s*\Z")
_EMPTY = re.compile(r"\s*(<think>)?\s*</think>\s*|<\|channel>thought\s*<channel\|>")
_EARLIER = re.compile(r"<think>\s*</think>\s*")
_THOUGHT = re.compile(
    r"\s*(<think>)?((?!</think>).)*</think>\s*"
    r"|<\|channel>thought\n((?!<channel\|>).)*<channel\|>"
    r"|<\|channel\|>analysis<\|message\|>((?!<\|end\|>).)*<\|end\|><\|start\|>assistant",
    re.DOTALL,
)
_HISTORY_END = {"<|return|>": "<|end|>"}  # gpt-oss ends the last turn otherwise than those before
_BEHIND_RESULTS = "<｜tool▁outputs▁end｜>"  # DeepSeek closes the results in the prompt, but not before another call


class NoReference(Exception):
    """A turn whose place the renderings of prefixes do not tell."""


class Reference:
    """One tokenizer's chat template and the options of one conversation."""

    def __init__(self, tokenizer: Any, tools: Any, **variables: Any) -> None:
        self.tokenizer, self.tools, self.variables = tokenizer, tools, variables
        added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self.special = sorted({*added, tokenizer.eos_token}, key=len, reverse=True)

    def render(self, messages: Messages, prompt: bool = False) -> str:
        """Return the tokenizer's own text of a conversation.

        It drops None; a chat template that asks for `content is none` is rendered as transformers does it underneath.
        """
        if any(message["content"] is None for message in messages):
            variables = {**self.tokenizer.special_tokens_map, **self.variables}
            return str(
                render_jinja_template(
                    [list(messages)],
                    tools=self.tools,
                    chat_template=self.tokenizer.get_chat_template(),
                    add_generation_prompt=prompt,
                    **variables,
                )[0][0]
            )
        return str(
            self.tokenizer.apply_chat_template(
                list(messages), tools=self.tools, tokenize=False, add_generation_prompt=prompt, **self.variables
            )
        )

    def spans(self, messages: Messages) -> tuple[str, list[Span]]:
        """Return the text of the conversation, and the characters of it that are trained."""
        text = self.render(messages)
        shown = self._as_shown(messages, text)
        spans: list[Span] = []
        for index, message in enumerate(shown):
            if message["role"] == "assistant":
                spans += self._turn(shown, index, text, own=messages[index].get("reasoning_content"))
        return text, spans

    def _as_shown(self, messages: Messages, text: str) -> Messages:
        """Leave out what the whole text does not show, but a prefix of it would.

        That is the reasoning of the rounds before the last, since in a prefix an earlier round is the last; and in
        gpt-oss what a calling turn says, which is analysis, once a final answer follows.
        """
        last = max(index for index, message in enumerate(messages) if message["role"] == "user")
        shown = [
            {key: value for key, value in message.items() if key != "reasoning_content"}
            if index < last
            else dict(message)
            for index, message in enumerate(messages)
        ]
        silent = [message | {"content": ""} if message.get("tool_calls") else message for message in shown]
        return next((each for each in (silent, shown) if self._same(each, text)), messages)

    def _same(self, messages: Messages, text: str) -> bool:
        try:
            return self.render(messages) == text
        except (TypeError, UndefinedError):  # a turn without words, where the chat template expects some
            return False

    def _turn(self, messages: Messages, index: int, text: str, own: str | None) -> list[Span]:
        message = messages[index]
        start = self._start(messages, index, text)
        if message.get("tool_calls") and message.get("content") and not self._is_prefix(messages, index, text):
            parts = self._behind_results(messages, index, text, start)
            if parts:
                return parts
        end = self._end(messages, index, text, start)
        thought = _EMPTY.match(text, start, end)
        return [(start if thought is None or own == "" else thought.end(), end)]

    def _is_prefix(self, messages: Messages, index: int, text: str) -> bool:
        return text.startswith(self.render(messages[: index + 1]).rstrip())

    def _start(self, messages: Messages, index: int, text: str) -> int:
        """Where the generation prompt ends, less what of it the turn does not have.

        Some prompts open a thought that a finished turn does not show, or open and close one where the turn has its
        own. Some chat templates write an empty thought in each turn of the last round, and so in a prefix, but not in
        an earlier round, or only its closing tag. Gemma 4 may end a turn in a prefix that goes on in the whole text.
        """
        prompt = self.render(messages[:index], prompt=True)
        earlier, thought = _OPENED.sub("", prompt), prompt[len(_OPENED.sub("", prompt)) :]
        opened = _CLOSED.sub("", thought)
        forms = [thought, opened, opened.removesuffix("\n"), opened.rstrip("\n"), ""]
        closed = earlier.replace("<think></think>", "</think>")
        for before in (earlier, _EARLIER.sub("", earlier), closed, earlier.removesuffix("<turn|>\n")):
            for shared in (*(before + form for form in forms), before.removesuffix(_BEHIND_RESULTS)):
                if text.startswith(shared):
                    return len(shared)
        raise NoReference(f"the prompt of turn {index} is no prefix: {prompt[-60:]!r}")

    def _end(self, messages: Messages, index: int, text: str, start: int) -> int:
        """Where the rendering up to the turn ends, without the line break behind its last token.

        If that is no prefix: in a rendering that the turn ends, some chat templates show a thought that they leave out
        before another turn, and gpt-oss ends it with another token. A turn that does not end with a special token ends
        with the one that opens what follows, because there the model stops.
        """
        ended = self.render(messages[: index + 1])
        if not text.startswith(ended.rstrip()):
            prompt = self.render(messages[:index], prompt=True)
            shared = next(len(s) for s in (prompt, _OPENED.sub("", prompt)) if ended.startswith(s))
            turns = [ended[shared:], _THOUGHT.sub("", ended[shared:], count=1)]
            turns = [turn.rstrip() for turn in turns]
            for last, history in _HISTORY_END.items():
                turns += [turn.removesuffix(last) + history for turn in turns if turn.endswith(last)]
            fitting = [turn for turn in turns if text.startswith(turn, start)]
            if not fitting:
                raise NoReference(f"turn {index} is another in the whole text: {ended[shared:]!r}, {text[start:]!r}")
            ended = text[:start] + fitting[0]
        end = len(ended.rstrip())
        if not any(text.endswith(token, start, end) for token in self.special):
            end = next((end + len(token) for token in self.special if text.startswith(token, end)), end)
        return end

    def _behind_results(self, messages: Messages, index: int, text: str, start: int) -> list[Span]:
        """The two parts of a turn whose text comes behind the results of its calls, as Gemma 4 has it."""
        silent = {**messages[index], "content": ""}
        following = [message["role"] for message in messages[index + 1 :]]
        results = following.index("assistant") if "assistant" in following else len(following)
        calls = self.render([*messages[:index], silent])
        answered = self.render([*messages[:index], silent, *messages[index + 1 : index + 1 + results]])
        content = messages[index]["content"]
        if not results or not text.startswith(answered + content):
            return []
        end = len(answered + content)
        end += next((len(token) for token in self.special if text.startswith(token, end)), 0)
        return [(start, len(calls)), (len(answered), end)]


def bracketed(text: str, spans: Sequence[Span]) -> str:
    """Return a text with brackets ⟦ ⟧ around spans; those that touch are one."""
    pieces, place = list[str](), 0
    for start, end in sorted(spans):
        pieces += [text[place:start], "⟦", text[start:end], "⟧"]
        place = end
    return "".join([*pieces, text[place:]]).replace("⟧⟦", "")
