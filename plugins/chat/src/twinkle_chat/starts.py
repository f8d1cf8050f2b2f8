"""Finds where the model takes over in a turn: behind the generation prompt, as far as the turn has it."""

import re
from collections.abc import Sequence
from typing import Any

from twinkle.errors import EncodeError
from twinkle_chat.rendering import ChatRenderer
from twinkle_chat.standins import Marked, common_start, render_marked, stem_for


class Prompts:
    """Knows where the model takes over in each turn: after the generation prompt, as far as the text has it there.

    What follows is the model's: the tag that opens its reasoning or a call, or the space before its first word.
    """

    def __init__(self, chat: ChatRenderer, messages: Sequence[dict[str, Any]], text: str) -> None:
        self._chat, self._messages, self._text = chat, messages, text
        self._leads: _Leads | None = None

    def start(self, index: int, first: int) -> int:
        """Return where turn `index` starts, whose own words begin at `first`."""
        if index == 0:
            return first
        if self._leads is None:
            self._leads = _Leads(self._chat, self._messages, stem_for(self._text))
        lead = self._leads.lead(index)
        if lead is None:
            return self.measured(index, first)
        length, prompted = lead
        start = first - length
        return start + len(prompted) if prompted.strip() and self._text.startswith(prompted, start) else start

    def measured(self, index: int, first: int) -> int:
        """Return where turn `index` starts by its own generation prompt, whatever the other turns have."""
        prompt = _prompt(self._chat, self._messages, index)
        before, plain = self._text[:first], self._chat.render(self._messages[:index]) if index else ""
        if not prompt:
            return first
        if not self._text.startswith(prompt):
            shared = _whole_tags(prompt, common_start(prompt, self._text))
            return min(shared, first) if shared > common_start(prompt, plain) else first
        if before[len(prompt) :].strip() and not _knows_prompts(self._chat, self._messages):
            return first  # what is between is the header, or the tag that opens a call
        return len(prompt)


def _prompt(chat: ChatRenderer, messages: Sequence[dict[str, Any]], index: int) -> str | None:
    """Render what the model is prompted with before turn `index`; None where the chat template wants more messages."""
    try:
        return chat.prompt(messages[:index]) if index else None
    except EncodeError:
        return None


def _knows_prompts(chat: ChatRenderer, messages: Sequence[dict[str, Any]]) -> bool:
    """Say whether this chat template writes a generation prompt at all; some add nothing behind tool results."""
    first = next((index for index, message in enumerate(messages) if index and message["role"] == "assistant"), 0)
    return first > 0 and _prompt(chat, messages, first) != chat.render(messages[:first])


class _Leads:
    """Knows how much of what the chat template writes before the words of a turn belongs to the turn.

    The text between the words of the message before and those of the turn is compared with what the chat template
    writes behind the former in the generation prompt. The part that both have is the message's, the rest the turn's.
    The prompt is rendered once for each kind of messages that a turn follows.
    """

    def __init__(self, chat: ChatRenderer, messages: Sequence[dict[str, Any]], stem: str) -> None:
        self._chat, self._messages, self._stem = chat, messages, stem
        self._turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        self._others = [turn - 1 for turn in self._turns if turn and messages[turn - 1]["role"] != "assistant"]
        self._before = _pieces_before(render_marked(chat, messages, self._turns, stem, others=self._others))
        self._knows = _knows_prompts(chat, messages)
        self._prompts: dict[Any, tuple[tuple[int, str], str] | None] = {}
        self._spoken: dict[Any, str | None] = {}

    def lead(self, index: int) -> tuple[int, str] | None:
        """Return how many characters before the words of turn `index` are the turn's; None where they do not tell.

        The second value is what the generation prompt has behind the shared part: a thought that it opens, which the
        words of the turn may begin with.
        """
        found = self._before.get(index)
        prompt = self._prompt(index)
        if found is None or prompt is None or (found[0][0] - index, found[0][1]) != prompt[0]:
            return None
        shared = _whole_tags(found[1], common_start(found[1], prompt[1]))
        if self._knows or not found[1][shared:].strip():
            return len(found[1]) - shared, prompt[1][shared:]
        # This chat template knows no generation prompt. What an answer without calls has before it is the header.
        spoken = self._as_spoken(index)
        if spoken is not None and spoken[shared:].strip():
            shared = _whole_tags(found[1], common_start(found[1], spoken))
        return len(found[1]) - shared, ""

    def _kind(self, index: int) -> Any:
        first = max(index - 2, 0)
        while first and self._messages[first]["role"] == "tool":
            first -= 1  # what a chat template writes behind results may depend on the turn that called
        return [(m["role"], bool(m.get("tool_calls")), bool(m["content"])) for m in self._messages[first:index]]

    def _prompt(self, index: int) -> tuple[tuple[int, str], str] | None:
        kind = str(self._kind(index))
        if kind not in self._prompts:
            turns = [turn for turn in self._turns if turn < index]
            others = [other for other in self._others if other < index]
            shown = render_marked(self._chat, self._messages[:index], turns, self._stem, others=others, prompt=True)
            ended = shown is not None and shown.marks
            self._prompts[kind] = (
                ((shown.marks[-1][0] - index, shown.marks[-1][1]), shown.pieces[-1]) if shown and ended else None
            )
        return self._prompts[kind]

    def _as_spoken(self, index: int) -> str | None:
        """Return what the chat template writes before turn `index` if the turn has text instead of calls."""
        kind = str(self._kind(index))
        if kind not in self._spoken:
            turn = {"role": "assistant", "content": "text"}
            messages = [*self._messages[:index], turn]
            turns = [turn for turn in self._turns if turn <= index]
            others = [other for other in self._others if other < index]
            found = _pieces_before(render_marked(self._chat, messages, turns, self._stem, others=others)).get(index)
            self._spoken[kind] = None if found is None else found[1]
        return self._spoken[kind]


def _pieces_before(marked: Marked | None) -> dict[int, tuple[tuple[int, str], str]]:
    """Return for each turn the stand-in before its first one, and the text between the two."""
    before: dict[int, tuple[tuple[int, str], str]] = {}
    if marked is None:
        return before
    for number, (owner, field) in enumerate(marked.marks):
        if number and field != "o" and owner not in before:
            before[owner] = marked.marks[number - 1], marked.pieces[number]
    return before


def _whole_tags(text: str, place: int) -> int:
    """Return the end of the last whole tag before `place`: `<think>` and `<tool_call>` share nothing."""
    opened = max(text.rfind("<", 0, place), text.rfind("[", 0, place))
    return opened if opened >= 0 and not re.search(r"[>\]\s]", text[opened:place]) else place
